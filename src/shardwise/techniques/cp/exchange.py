"""The ways in which keys and values come to the ranks of a group, and the sums of their gradients home.

Around a *ring* (Liu et al., "Ring Attention with Blockwise Transformers", 2023) those of one rank come at a time, while
the device computes with those that came before; their gradients follow them. *Gathered*, those of all ranks come at
once, and the gradients of all are scattered at once. Keys and values are one tensor [2,b,hk,s,e].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.distributed.collectives import Group, all_gather, reduce_scatter
from shardwise.spec.rows import Hop, TokenRun, WholeRows, held, hops, needs
from shardwise.techniques.cp.parts import ALL, Sees, placed

Messages = list[tuple[Tensor | None, int | None]]
"""Each with the rank that it goes to or comes from, if any."""
Index = tuple[slice, ...]


@dataclass
class Passing:
    """Gradients on their way: what others have summed for the keys of this step, and what comes ``home``. What is
    ``sent`` must stay until it has arrived."""

    works: list[dist.Work]
    sums: Tensor | None = None
    home: Tensor | None = None
    sent: Tensor | None = None

    def add(self, to_sums: Tensor | None, to_home: Tensor) -> None:
        """Wait, and add what has come."""
        for work in self.works:
            work.wait()
        if self.sums is not None and to_sums is not None:
            to_sums += self.sums
        if self.home is not None:
            to_home += self.home


class RingExchange:
    """An exchange of the keys of one rank at a time, of ``count`` rows of a micro-batch."""

    def __init__(self, group: Group, rows: WholeRows, count: int, sees: Sees) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.steps = dist.get_world_size(group)
        self.place = self.steps, self.rank
        self.hops = hops(needs(rows, count, self.steps, sees.causal, sees.window), self.rank)

    def keys(self, own: Tensor) -> Iterator[tuple[int, Tensor | None]]:
        """Yield first this rank's ``own``, then those of each other rank, whose number they come with; None where this
        rank sees nothing of them."""
        owner: int = self.rank
        keys: Tensor | None = own
        for hop in self.hops:
            coming = None if hop.keys_from is None else torch.empty_like(own)
            works = self._begun([(keys, hop.held_to), (own, hop.own_to)], [(coming, hop.keys_from)])
            yield owner, keys
            for work in works:
                work.wait()
            owner, keys = hop.owner, coming

    def passed(self, step: int, sums: Tensor | None, like: Tensor) -> Passing:
        """Begin to pass on the gradients ``sums`` of the keys of the step before. Complete when it has been waited for:
        what others have summed for those of this ``step``, and what comes home. ``like``: sums of any keys."""
        hop = self.hops[step - 1] if step else Hop(self.rank)
        sums_so_far = None if hop.sums_from is None else torch.empty_like(like)
        home = None if hop.home_from is None else torch.empty_like(like)
        works = self._begun([(sums, hop.sums_to)], [(sums_so_far, hop.sums_from), (home, hop.home_from)])
        return Passing(works, sums_so_far, home, sums)

    def _begun(self, sent: Messages, received: Messages) -> list[dist.Work]:
        ops = [
            dist.P2POp(does, tensor, group=self.group, group_peer=peer)
            for does, messages in ((dist.isend, sent), (dist.irecv, received))
            for tensor, peer in messages
            if tensor is not None and peer is not None
        ]
        return dist.batch_isend_irecv(ops) if ops else []


class GatherExchange:
    """An exchange of the keys of all ranks at once."""

    def __init__(self, group: Group, rows: WholeRows, count: int) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.rows = rows
        self.steps = 2
        self.place = (self.ranks, self.rank)
        self.alike = [TokenRun(0, count)] if rows.bounds is None else [TokenRun(row, row + 1) for row in range(count)]

    def keys(self, own: Tensor) -> Iterator[tuple[int, Tensor | None]]:
        """Yield first this rank's ``own``, then those of ``ALL``, in the order of the rows."""
        flat = own.new_empty(self.ranks * own.numel())
        work = all_gather(flat, own.flatten(), group=self.group, async_op=True)
        yield self.rank, own
        work.wait()
        whole = self._ordered(flat.view(self.ranks, *own.shape))
        del flat
        yield ALL, whole

    def passed(self, step: int, sums: Tensor | None, like: Tensor) -> Passing:
        """Pass gradients on as a :class:`RingExchange` does: after the last step, what all ranks have summed is
        scattered."""
        if sums is None:
            return Passing([])
        apart, home = like.new_empty(self.ranks, *like.shape), torch.empty_like(like)
        for rank, places, run in self._places():
            apart[rank][places] = sums[run]
        work = reduce_scatter(home.view(-1), apart.view(-1), group=self.group, async_op=True)
        return Passing([work], None, home, apart)

    def _ordered(self, parts: Tensor) -> Tensor:
        """[ranks,2,b,hk,s,e] -> [2,b,hk,ranks*s,e], in the order of the rows."""
        _, two, b, heads, s, e = parts.shape
        whole = parts.new_empty(two, b, heads, self.ranks * s, e)
        for rank, places, run in self._places():
            whole[run] = parts[rank][places]
        return whole

    def _places(self) -> Iterator[tuple[int, Index, Index]]:
        """Yield each rank for each of its pieces, with where that is in what the rank holds, and where in the rows."""
        for alike in self.alike:
            for rank, pieces in enumerate(held(self.rows, alike.start, self.ranks)):
                for run, at in placed(pieces):
                    rows = slice(None), slice(*alike), slice(None)
                    yield rank, (*rows, slice(at, at + run.length)), (*rows, slice(*run))
