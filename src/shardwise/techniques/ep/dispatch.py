"""Rows go to the ranks that have their experts, and what these make of them comes back.

``shardwise::start_rows`` begins an exchange, and ``shardwise::wait_rows`` waits for it; what is computed between the
two runs beside it. In backward the gradients of what came begin their way back where it was waited for, and are waited
for where it was begun. Autograd runs first what was called last, so that the backward of what was between the two is
between them again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.distributed.torch_private import group_named
from shardwise.models.grouped import owners, sorting

Products = Callable[[Tensor, Tensor], Tensor]
"""What the experts of this rank make of rows [R,d], sorted by expert, of which each has so many ([E])."""


class Dispatch(NamedTuple):
    """The exchange of rows between the ``ranks`` of the group with this name. ``imbalance``: in a fake world, where
    nothing comes, how many times the rows that it sends a rank is taken to get; None in a real one."""

    group: str
    ranks: int
    imbalance: float | None = None


def computed_elsewhere(
    products: Products, how: Dispatch, rows: Tensor, counts: Tensor, beside: Callable[[], Tensor] | None = None
) -> Tensor:
    """Rows [n*k,d] sorted by expert, of which each of all E experts has so many ([E]) -> what the experts make of them,
    in the same order. ``beside`` is called while rows are on their way."""
    even = [counts.shape[0] // how.ranks] * how.ranks
    there = exchanged(counts, Way(how.group, even, even))
    if how.imbalance is None:
        sent, come = splits(counts.view(how.ranks, -1), there.view(how.ranks, -1))
    else:
        sent = _even(rows.shape[0], how.ranks)
        each = _even(round(rows.shape[0] * how.imbalance), there.shape[0])
        own_experts = there.shape[0] // how.ranks
        come = [sum(each[first : first + own_experts]) for first in range(0, there.shape[0], own_experts)]
        there = torch.tensor(each, device=there.device)
    of_rank, way = there.view(how.ranks, -1), Way(how.group, sent, come)
    own = _Started.apply(rows, way)
    order, inverse = sorting(owners(of_rank.flatten(), own.shape[0]) % of_rank.shape[1])
    if beside is not None:
        try:
            beside()
        except BaseException:  # such as that with which a recomputation ends that needs nothing more
            wait_rows(own)
            raise
    own = _Permuted.apply(_Arrived.apply(own, way), order, inverse)
    own = _Permuted.apply(products(own, of_rank.sum(0)), inverse, order)
    return exchanged(own, Way(how.group, come, sent))


def splits(by_rank: Tensor, of_rank: Tensor) -> tuple[list[int], list[int]]:
    """Return how many rows go to each rank, and come from each: of counts [ranks,E/ranks] for the experts of each rank,
    and from each rank for this one's. The one place where the host waits for the device."""
    sent, come = torch.stack([by_rank.sum(1), of_rank.sum(1)]).tolist()
    return sent, come


def _even(rows: int, parts: int) -> list[int]:
    return [rows // parts + (part < rows % parts) for part in range(parts)]


class _Permuted(torch.autograd.Function):
    """x [R,d] in another ``order``, whose ``inverse`` gives its gradients theirs: no two rows are one."""

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        return x.index_select(0, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


@dataclass
class Way:
    """The rows from each rank of a group to each: how many are ``sent`` to each, one after another, and how many
    ``come`` from it. ``home``: in backward, where the gradients of those that were sent will be."""

    group: str
    sent: list[int]
    come: list[int]
    home: Tensor | None = None


def exchanged(x: Tensor, way: Way) -> Tensor:
    """x [R,..] -> the rows that come. Nothing is computed meanwhile."""
    here: Tensor = _Arrived.apply(_Started.apply(x, way), way)
    return here


class _Started(torch.autograd.Function):
    """x [R,..] -> where the rows that come will be. Backward waits for the gradients of x: those that it is given are
    on their way, and have as many rows as came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Way) -> Tensor:
        ctx.way = way
        return start_rows(x, way.group, way.sent, way.come)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        home, ctx.way.home = ctx.way.home, None
        wait_rows(home)
        return home, None


class _Arrived(torch.autograd.Function):
    """The result of :class:`_Started`, once the rows are there. Backward begins to send their gradients home."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Way) -> Tensor:
        ctx.way = way
        wait_rows(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.way.home = start_rows(grad, ctx.way.group, ctx.way.come, ctx.way.sent)
        return grad, None


UNDER_WAY: dict[int, tuple[dist.Work | None, Tensor]] = {}
"""By the storage that is received into: what is waited for, and what is sent, which must stay until then."""


def started(x: Tensor, group: str, sent: list[int], come: list[int]) -> Tensor:
    """Begin an exchange of rows as ``start_rows`` does, operation by operation."""
    out, x = x.new_empty(sum(come), *x.shape[1:]), x.contiguous()
    work = dist.all_to_all_single(out, x, come, sent, group=group_named(group), async_op=True)
    UNDER_WAY[out.untyped_storage()._cdata] = work, x
    return out


start_rows = torch.library.custom_op("shardwise::start_rows", started, mutates_args=())


@start_rows.register_fake
def _(x: Tensor, group: str, sent: list[int], come: list[int]) -> Tensor:
    out = x.new_empty(sum(come), *x.shape[1:])
    UNDER_WAY[out.untyped_storage()._cdata] = None, x
    return out


def waited(x: Tensor) -> None:
    """Wait as ``wait_rows`` does, which fills what ``start_rows`` returned. Where that has been waited for, do nothing:
    recomputation that saves what came starts nothing."""
    work, _ = UNDER_WAY.pop(x.untyped_storage()._cdata, (None, None))
    if work is not None:
        work.wait()


wait_rows = torch.library.custom_op("shardwise::wait_rows", waited, mutates_args=("x",))
wait_rows.register_fake(waited)
