"""What the operations of context parallelism hold and send, on paper. No torch.

A rank's queries have P numbers, its keys and values 2X, in the dtype that is computed with; sums are in fp32 (fp64).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.spec.rows import Hop, WholeRows, hops, needs
from shardwise.spec.sheet import At, Op, Sent, Within, number


def exchange(op: Op, at: At) -> Within:
    """Of the buffers that tokens are exchanged through, the result takes the place of one."""
    return Within(op.flops * at.b * at.s)


@dataclass(frozen=True)
class Sizes:
    """Bytes: of queries (the output is as large), of keys and values, and of sums as large as either; ``rows`` is a
    number for each query and head."""

    queries: int
    keys: int
    query_sums: int
    key_sums: int
    rows: int

    @classmethod
    def of(cls, op: Op, at: At) -> Sizes:
        heads, tokens, _, head_dim, key_heads = (number(dim, (at.b, at.s)) for dim in op.dims)
        wide, queries, keys = max(4, at.width), heads * tokens * head_dim, 2 * key_heads * tokens * head_dim
        return cls(queries * at.width, keys * at.width, queries * wide, keys * wide, heads * tokens * wide)

    @property
    def summed_apart(self) -> bool:
        """Whether sums are another tensor than the result, in a wider dtype."""
        return self.query_sums > self.queries


def forward(op: Op, at: At) -> Within:
    """The output in fp32, what has come of keys, and what one call of the kernel makes, joined."""
    one, ring = Sizes.of(op, at), at.cut.ring
    call = one.queries + one.query_sums + 4 * one.rows
    sums = one.query_sums - one.queries if one.summed_apart else 0  # the result is made when the rest is gone
    if at.cut.gathered:
        everyone = ring * one.keys
        return Within(sums + one.keys + everyone + max(call, everyone), (Sent("all_gather", everyone, 1 / ring),))
    copies = 2 if ring == 2 else 3  # its own, those that it computes with, and those that come
    sent = tuple(sending for hop in _hops(at) for sending in _keys(hop, one.keys, 1 / ring))
    return Within(sums + copies * one.keys + call, sent)


def backward(op: Op, at: At) -> Within:
    """The same with gradients: those of queries, of its own keys, of those that it computes with, and on their way."""
    one, ring = Sizes.of(op, at), at.cut.ring
    sums = one.query_sums - one.queries if one.summed_apart else 0
    sums -= one.keys  # as above
    if at.cut.gathered:
        keys, key_sums = ring * one.keys, ring * one.key_sums
        computing = one.keys + keys + one.key_sums + key_sums + one.queries + keys
        held = max(computing, 2 * key_sums + 2 * one.key_sums)
        return Within(sums + held, (Sent("all_gather", keys, 1 / ring), Sent("reduce_scatter", key_sums)))
    first = 2 * one.keys + one.key_sums + one.queries + one.keys
    later = (2 if ring == 2 else 3) * one.keys + (2 if ring == 2 else 4) * one.key_sums + one.queries + one.keys // 2
    share = one.keys / (one.keys + one.key_sums) / ring
    found = list[Sent]()
    for step, hop in enumerate(_hops(at), 1):
        found += _keys(hop, one.keys, share)
        found += [Sent("send", one.key_sums, (1 / ring - share) * (step < ring))] * (hop.sums_to is not None)
        found += [Sent("recv", one.key_sums)] * ((hop.sums_from is not None) + (hop.home_from is not None))
    return Within(sums + max(first, later), tuple(found))


def _hops(at: At) -> tuple[Hop, ...]:
    """Of a rank, where rows are one document."""
    return hops(needs(WholeRows(at.cut.length), 1, at.cut.ring, True, at.window), at.cut.index)


def _keys(hop: Hop, size: int, beside: float) -> Iterator[Sent]:
    for target in (hop.held_to, hop.own_to):
        if target is not None:
            yield Sent("send", size, beside)
    if hop.keys_from is not None:
        yield Sent("recv", size)
