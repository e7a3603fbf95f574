"""Rows that are cut among ranks: which tokens each has, and which of its queries see which keys of the others.

A row is cut in two pieces for each rank of a ring. Under a causal mask the queries of a later piece see more keys, so
each rank has one piece that sees much and one that sees little: of a row of one document the first and the last, the
second and the last but one, and so on ("zigzag", Zhu, "ring-flash-attention", 2024). With documents the pieces are
ordered by what their queries see, not by their place. Ranks that exchange tokens for heads share a rank's two pieces
evenly, in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple


class TokenRun(NamedTuple):
    """The tokens of a row from ``start`` up to, but not including, ``stop``."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def moved(self, by: int) -> TokenRun:
        return TokenRun(self.start + by, self.stop + by)

    def within(self, start: int, stop: int) -> TokenRun:
        """Return the part between ``start`` and ``stop``; empty where there is none."""
        first = max(self.start, start)
        return TokenRun(first, max(first, min(self.stop, stop)))


class Sight(NamedTuple):
    """Queries and keys that see each other, all of them but for a window. ``own``: they are the same tokens, of one or
    several documents, and causal attention is computed within each."""

    queries: TokenRun
    keys: TokenRun
    own: bool = False


def pieces_of(ring: int) -> int:
    """Return how many pieces of each row a rank has, of equal length, where states pass from one to the next."""
    return 2 if ring > 1 else 1


@dataclass(frozen=True)
class WholeRows:
    """The rows of which a rank has some tokens: ``length`` tokens each. ``bounds``: where their documents end, counted
    over the tokens of all rows, 0 and every row's end included; None where each row is one document."""

    length: int
    bounds: tuple[int, ...] | None = None

    def ends(self, row: int) -> tuple[int, ...]:
        """Return where the documents of a row end, counted from its start."""
        return _ends(self, row)


@lru_cache(maxsize=256)
def _ends(rows: WholeRows, row: int) -> tuple[int, ...]:
    first, last = row * rows.length, (row + 1) * rows.length
    return tuple(bound - first for bound in rows.bounds or (last,) if first < bound <= last)


@dataclass(frozen=True)
class RowShare:
    """The share of a rank in the tokens of every row: ``index`` is its number among the ranks with tokens of the same
    rows, which are rings of ``ring`` across groups of ``ulysses`` neighbours."""

    ring: int = 1
    ulysses: int = 1
    index: int = 0

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses

    def runs(self, rows: WholeRows, row: int) -> list[TokenRun]:
        """Return the rank's tokens of a row, in its order."""
        pieces = held(rows, row, self.ring)[self.index // self.ulysses]
        size, found = rows.length // self.ranks, list[TokenRun]()
        first = self.index % self.ulysses * size
        for piece in pieces:
            part = piece.within(piece.start + first, piece.start + first + size)
            found += [part] * (part.length > 0)
            first -= piece.length
        return found


def parts_of(ring: int, ulysses: int) -> int:
    """Return what the length of a row must be a multiple of."""
    return ring * ulysses if ring == 1 or ulysses % 2 == 0 else 2 * ring * ulysses


@lru_cache(maxsize=256)
def held(rows: WholeRows, row: int, ring: int) -> tuple[tuple[TokenRun, ...], ...]:
    """Return for each rank of a ring its pieces of a row, in the order of the row; for a ring of one, the row."""
    if ring == 1:
        return ((TokenRun(0, rows.length),),)
    size = rows.length // (2 * ring)
    pieces = [TokenRun(size * number, size * (number + 1)) for number in range(2 * ring)]
    pieces.sort(key=lambda piece: (_pairs(piece, rows.ends(row)), piece))
    return tuple(tuple(sorted((pieces[rank], pieces[-1 - rank]))) for rank in range(ring))


def _pairs(piece: TokenRun, ends: Sequence[int]) -> int:
    """Return how many keys the queries of a piece see together: each sees those of its document up to itself."""
    total = 0
    for start, stop in pairwise((0, *ends)):
        own = piece.within(start, stop)
        total += own.length * (own.start - start) + own.length * (own.length + 1) // 2
    return total


def sights(
    queries: TokenRun, keys: TokenRun, ends: Sequence[int], *, causal: bool = True, window: int | None = None
) -> Iterator[Sight]:
    """Yield what a run of queries sees of a run of keys, which is the same run or has no token of it: of each of the
    two at most one document has tokens in both."""
    if queries == keys:
        yield Sight(queries, keys, own=True)
        return
    far = window or ends[-1]
    if keys.start < queries.start:
        start, stop = _document(queries.start, ends)
        seen = keys.within(max(start, queries.start - far + 1), queries.start)
        seeing = queries.within(queries.start, min(stop, seen.stop + far - 1))
    elif causal:
        return
    else:
        start, stop = _document(queries.stop - 1, ends)
        seen = keys.within(queries.stop, min(stop, queries.stop + far - 1))
        seeing = queries.within(max(start, seen.start - far + 1), queries.stop)
    if seen.length and seeing.length:
        yield Sight(seeing, seen)


def _document(token: int, ends: Sequence[int]) -> tuple[int, int]:
    """Start and stop of the document that a token is in."""
    return next((start, stop) for start, stop in pairwise((0, *ends)) if token < stop)


@lru_cache(maxsize=256)
def needs(rows: WholeRows, count: int, ring: int, causal: bool, window: int | None) -> tuple[tuple[bool, ...], ...]:
    """Say for each rank of a ring, and each other one, whether it sees any of the other's keys in ``count`` rows. Its
    own it always sees."""

    def sees(rank: int, other: int) -> bool:
        return any(
            True
            for row in range(count)
            for queries in held(rows, row, ring)[rank]
            for keys in held(rows, row, ring)[other]
            for _ in sights(queries, keys, rows.ends(row), causal=causal, window=window)
        )

    return tuple(tuple(rank == other or sees(rank, other) for other in range(ring)) for rank in range(ring))


class Hop(NamedTuple):
    """The exchange of a rank of a ring with its neighbours before it computes with the keys of ``owner``, in the order
    of time; None: nothing. Keys come ``keys_from`` the rank before it, or where that one does not see them from their
    owner; the keys that it holds go on to the next, ``held_to``; its own go directly ``own_to`` a rank that the one
    before does not pass them on to. Gradients of keys go the same way behind them, and from the last that saw the keys
    home: ``sums_from`` has begun those of these keys; ``sums_to`` gets those of the keys before; ``home_from`` comes
    what is complete of its own."""

    owner: int
    keys_from: int | None = None
    held_to: int | None = None
    own_to: int | None = None
    sums_from: int | None = None
    sums_to: int | None = None
    home_from: int | None = None


@lru_cache(maxsize=256)
def hops(seen: tuple[tuple[bool, ...], ...], rank: int) -> tuple[Hop, ...]:
    """The hops of a rank, of which the last brings gradients home and no keys. ``seen`` is what :func:`needs` says."""
    ring, found = len(seen), list[Hop]()
    for step in range(1, ring + 1):
        owner = (rank - step) % ring
        after = (rank + 1) % ring
        before = (rank - 1) % ring
        computes, held = step < ring and seen[rank][owner], (rank - step + 1) % ring  # whose keys it holds until now
        goes_on = step < ring and seen[after][held]
        returns = step > 1 and seen[rank][held] and not goes_on  # what it has summed for them goes home
        target, farther = (rank + step) % ring, (rank + step - 1) % ring
        found.append(
            Hop(
                owner if computes else rank,
                keys_from=(before if step == 1 or seen[before][owner] else owner) if computes else None,
                held_to=after if goes_on and seen[rank][held] else None,
                own_to=target if 1 < step < ring and seen[target][rank] and not seen[farther][rank] else None,
                sums_from=before if computes and step > 1 and seen[before][owner] else None,
                sums_to=after if step > 1 and goes_on and seen[rank][held] else held if returns else None,
                home_from=farther
                if step > 1 and seen[farther][rank] and (step == ring or not seen[target][rank])
                else None,
            )
        )
    return tuple(found)
