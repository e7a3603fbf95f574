"""The bytes that the operations of context parallelism hold and send, on paper: in the same steps as ring_attention.py.
No torch. Rows are one document each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from shardwise.models.delta_sizes import kept
from shardwise.spec.rows import Hop, WholeRows, hops, needs, pieces_of
from shardwise.spec.sheet import At, Op, SentMeanwhile, Within, number
from shardwise.techniques.cp.parts import ALL, Sees, parts


def exchange(op: Op, at: At) -> Within:
    """Return what an exchange of tokens holds: of its buffers, the result takes the place of one. Rows that go to
    experts need none."""
    if op.axis == "ep":
        return Within()
    return Within(op.flops * at.b * at.s)


@dataclass
class HeldBytes:
    """The bytes that are held, and the most that were."""

    now: int = 0
    top: int = 0

    def add(self, *sizes: int) -> None:
        self.now += sum(sizes)
        self.top = max(self.top, self.now)

    def drop(self, *sizes: int) -> None:
        self.now -= sum(sizes)

    def meanwhile(self, size: Fraction | int) -> None:
        """Make so many bytes, and free them."""
        self.top = max(self.top, self.now + int(size))


@dataclass(frozen=True)
class AttentionBytes:
    """The bytes of queries, of the output, of keys and values, of sums as large as any of these, and of a number for
    each query and head in the dtype of sums."""

    queries: int
    outputs: int
    keys: int
    query_sums: int
    output_sums: int
    key_sums: int
    rows: int

    @classmethod
    def of(cls, op: Op, at: At) -> AttentionBytes:
        heads, tokens, _, head_dim, key_heads, value_dim = (number(dim, (at.b, at.s)) for dim in op.dims)
        wide, keys = max(4, at.width), key_heads * tokens * (head_dim + value_dim)
        queries = heads * tokens * head_dim
        outputs = heads * tokens * value_dim
        rows = heads * tokens
        sizes = (queries * at.width, outputs * at.width, keys * at.width)
        return cls(*sizes, queries * wide, outputs * wide, keys * wide, rows * wide)

    @property
    def apart(self) -> bool:
        """Return whether sums of queries are another tensor than the result, in a wider dtype."""
        return self.query_sums > self.queries


class RingStep(NamedTuple):
    """A step of attention: whose keys a rank computes with, and bytes: of these keys, of the sums of their gradients,
    of what is made for the keys that come meanwhile, and for gradients that come."""

    owner: int
    keys: int
    sums: int
    coming: int = 0
    passing: int = 0


def steps(one: AttentionBytes, at: At) -> list[RingStep]:
    """Return the steps of a rank, of which the last computes nothing: gradients come home."""
    ring, rank = at.cut.ring, at.cut.rank
    if at.cut.gathered:
        keys, sums = ring * one.keys, ring * one.key_sums
        return [
            RingStep(rank, one.keys, 0, keys),
            RingStep(ALL, keys, sums),
            RingStep(ALL, 0, 0, 0, sums + one.key_sums),
        ]
    found = list[RingStep]()
    owner = rank
    here = True
    passing = 0
    for hop in _hops(at):
        coming = one.keys * (hop.keys_from is not None)
        found.append(RingStep(owner, one.keys * here, one.key_sums * (here and owner != rank), coming, passing))
        owner, here = hop.owner, hop.keys_from is not None
        passing = one.key_sums * ((hop.sums_from is not None) + (hop.home_from is not None))
    return [*found, RingStep(rank, 0, 0, 0, passing)]


def forward(op: Op, at: At) -> Within:
    """Return what forward holds (the joined output, keys, and what each call of the kernel makes) and sends."""
    one, held = AttentionBytes.of(op, at), HeldBytes()
    held.add(one.output_sums * one.apart, one.keys)
    for place, step in enumerate(steps(one, at)[:-1]):
        held.add(step.coming)
        for queries, _ in _calls(step, at):
            held.meanwhile(queries * (one.outputs + one.output_sums + 4 * one.rows))
        held.meanwhile(step.coming * at.cut.gathered)  # the same in the order of rows
        held.drop(step.keys * (place > 0))
    return Within(held.top - one.outputs * one.apart, tuple(_sent(one, at)))


def backward(op: Op, at: At) -> Within:
    """Return what backward holds (gradients of queries, of its own keys, of those that it computes with, and those on
    their way) and sends."""
    one = AttentionBytes.of(op, at)
    held = HeldBytes()
    before = 0
    held.add(one.query_sums * one.apart, one.keys, one.key_sums)
    *computing, last = steps(one, at)
    for place, step in enumerate(computing):
        held.add(step.coming, step.passing, step.sums)
        for queries, keys in _calls(step, at):
            held.meanwhile(queries * (one.queries + one.rows * (queries < 1)) + keys * step.keys)
        held.meanwhile(step.coming * at.cut.gathered)
        held.drop(step.passing, before, step.keys * (place > 0))
        before = step.sums
    held.drop(one.keys)
    held.meanwhile(last.passing)
    return Within(held.top - one.queries * one.apart - one.keys, tuple(_sent_back(one, at)))


def _calls(step: RingStep, at: At) -> Iterator[tuple[Fraction, Fraction]]:
    """Yield for each call of the kernel with these keys its share of the queries and of the keys."""
    rows, ring = WholeRows(at.cut.length), at.cut.ring
    if step.keys:
        for part in parts(rows, at.b, (ring, at.cut.rank), step.owner, Sees(True, at.window)):
            there = rows.length if step.owner == ALL else at.cut.length // ring
            yield Fraction(part.queries.length, at.cut.length // ring), Fraction(part.keys.length, there)


def _hops(at: At) -> tuple[Hop, ...]:
    return hops(needs(WholeRows(at.cut.length), 1, at.cut.ring, True, at.window), at.cut.rank)


def _sent(one: AttentionBytes, at: At) -> Iterator[SentMeanwhile]:
    """Yield the messages of forward: keys, each while the device computes with others."""
    beside = 1 / at.cut.ring
    if at.cut.gathered:
        yield SentMeanwhile("all_gather", at.cut.ring * one.keys, beside)
        return
    for hop in _hops(at):
        yield from _each(one.keys, (hop.held_to, hop.own_to), (hop.keys_from,), beside)


def _sent_back(one: AttentionBytes, at: At) -> Iterator[SentMeanwhile]:
    """Yield the messages of backward: keys once more, and behind them the sums of their gradients."""
    ring = at.cut.ring
    if at.cut.gathered:
        yield SentMeanwhile("all_gather", ring * one.keys, 1 / ring)
        yield SentMeanwhile("reduce_scatter", ring * one.key_sums)
        return
    share = one.keys / (one.keys + one.key_sums) / ring
    for step, hop in enumerate(_hops(at), 1):
        yield from _each(one.keys, (hop.held_to, hop.own_to), (hop.keys_from,), share)
        yield from _each(
            one.key_sums, (hop.sums_to,), (hop.sums_from, hop.home_from), (1 / ring - share) * (step < ring)
        )


def _each(
    size: int, targets: Sequence[int | None], sources: Sequence[int | None], beside: float
) -> Iterator[SentMeanwhile]:
    yield from (SentMeanwhile("send", size, beside) for target in targets if target is not None)
    yield from (SentMeanwhile("recv", size) for source in sources if source is not None)


class StateBytes(NamedTuple):
    """The bytes of the states and the maps of a rank's pieces, of the maps of all, and of what is made for each token:
    of keys and values, and of the states that are kept."""

    states: int
    maps: int
    all_maps: int
    heads: int
    kept: int

    @classmethod
    def of(cls, op: Op, at: At) -> StateBytes:
        tokens, key, value, ranks, pieces = (number(dim, (at.b, at.s)) for dim in op.dims)
        wide, heads = max(4, at.width), tokens // at.s * pieces
        states, maps = wide * heads * key * value, wide * heads * key * (key + value)
        return cls(states, maps, ranks * maps, tokens * value * at.width, tokens * kept(key, value) * wide)

    @property
    def sent(self) -> tuple[SentMeanwhile, ...]:
        return (SentMeanwhile("all_gather", self.all_maps),)


def states(op: Op, at: At) -> Within:
    """Return what the rule holds and sends forward where states pass between pieces: their maps, before the outputs
    are there."""
    one = StateBytes.of(op, at)
    return Within(max(0, one.all_maps + one.states - one.heads - one.kept), one.sent)


def states_back(op: Op, at: At) -> Within:
    """Return the same of backward, before the gradients are there, of which those of values alone are counted."""
    one = StateBytes.of(op, at)
    return Within(max(one.states, one.all_maps + one.maps + one.states - one.heads), one.sent)


def _tail(op: Op, at: At) -> tuple[int, int]:
    """The bytes of the tokens of a rank that the next pieces add up, and of all ranks'."""
    channels, tokens, ranks = (number(dim, (at.b, at.s)) for dim in op.dims)
    own = at.b * pieces_of(at.cut.ring) * tokens * channels * at.width
    return own, ranks * own


def tails(op: Op, at: At) -> Within:
    """Return what sums over tokens hold and send forward: the last tokens of all pieces, then the first of a rank's
    own once more."""
    (own, whole), (channels, *_) = _tail(op, at), op.dims
    made = number(channels, (at.b, at.s)) * at.b * at.s * at.width
    return Within(max(4 * own, whole + own - made), (SentMeanwhile("all_gather", whole),))


def tails_back(op: Op, at: At) -> Within:
    """Return the same of backward, which copies the gradient that it is given."""
    (own, whole), (channels, taps, _) = _tail(op, at), (number(dim, (at.b, at.s)) for dim in op.dims)
    weight, made = channels * (taps + 1) * at.width, channels * at.b * at.s * at.width
    return Within(4 * own + weight + max(made, whole), (SentMeanwhile("all_gather", whole),))
