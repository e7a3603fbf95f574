"""The parts of attention that a rank computes when the keys of another rank are there, piece by piece. No torch.

Places are those in what a rank holds: of its queries, and of the keys that have come to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from shardwise.spec.rows import TokenRun, WholeRows, held, sights

ALL = -1
"""Instead of a rank's number: the keys of all others, in the order of the row."""


class KernelCall(NamedTuple):
    """One call of a kernel: these rows, queries and keys, which see each other as ``Rule.apart`` says. ``lengths``: of
    own tokens (``apart`` is None), those of the documents in them, row after row; none where rows are documents."""

    rows: TokenRun
    queries: TokenRun
    keys: TokenRun
    apart: int | None = None
    lengths: tuple[int, ...] = ()


class Sees(NamedTuple):
    """The rule that is the same for all tokens."""

    causal: bool
    window: int | None


def copies(key_heads: int, ranks: int) -> int:
    """Return to how many of the ranks that exchange tokens for heads each key head goes: to several, where heads are
    fewer."""
    return ranks // key_heads if key_heads < ranks else 1


@lru_cache(maxsize=1024)
def parts(rows: WholeRows, count: int, ring: tuple[int, int], other: int, sees: Sees) -> tuple[KernelCall, ...]:
    """Return what rank ``ring[1]`` of ``ring[0]`` computes of ``count`` rows with the keys of an ``other`` rank, or of
    itself. Where rows are documents, all of them at once."""
    ranks, rank = ring
    if other == rank and sees.window is None:  # in their order, tokens see each other as if they stood side by side
        whole = TokenRun(0, rows.length // ranks)
        lengths = tuple(length for row in range(count) for length in _lengths(rows, row, held(rows, row, ranks)[rank]))
        return (KernelCall(TokenRun(0, count), whole, whole, None, lengths if rows.bounds else ()),)
    each = [TokenRun(0, count)] if rows.bounds is None else [TokenRun(row, row + 1) for row in range(count)]
    return tuple(part for one in each for part in _of_rows(rows, one, ring, other, sees))


def _of_rows(rows: WholeRows, alike: TokenRun, ring: tuple[int, int], other: int, sees: Sees) -> list[KernelCall]:
    """Return the calls of a kernel for rows whose documents are the same."""
    mine = held(rows, alike.start, ring[0])[ring[1]]
    ends = rows.ends(alike.start)
    found = list[KernelCall]()
    coming = placed(held(rows, alike.start, ring[0])[other]) if other != ALL else _gaps(mine, rows.length)
    for queries, at in placed(mine):
        for keys, there in coming:
            for sight in sights(queries, keys, ends, causal=sees.causal, window=sees.window):
                lengths = tuple(_lengths(rows, alike.start, (queries,))) * alike.length if sight.own else ()
                apart = None if sight.own else sight.queries.start - sight.keys.start
                places = sight.queries.moved(at - queries.start), sight.keys.moved(there - keys.start)
                found.append(KernelCall(alike, *places, apart, lengths if rows.bounds else ()))
    if sees.window is not None:
        return found
    pairs = _joined((keys, queries) for queries, keys in _joined((part.queries, part.keys) for part in found))
    return [KernelCall(alike, queries, keys, queries.start - keys.start) for keys, queries in pairs]


def placed(runs: tuple[TokenRun, ...]) -> list[tuple[TokenRun, int]]:
    """Return runs that lie one behind the other, each with its place."""
    return [(run, sum(before.length for before in runs[:number])) for number, run in enumerate(runs)]


def _gaps(mine: tuple[TokenRun, ...], length: int) -> list[tuple[TokenRun, int]]:
    """Return what a row has besides these runs, in the order and at the places of the row."""
    ends = [0, *(end for run in mine for end in run), length]
    return [(TokenRun(start, stop), start) for start, stop in zip(ends[::2], ends[1::2], strict=True) if start < stop]


def _lengths(rows: WholeRows, row: int, runs: tuple[TokenRun, ...]) -> Iterator[int]:
    """Yield how many tokens of each document are in the runs, in their order."""
    for start, stop in pairwise((0, *rows.ends(row))):
        if length := sum(run.within(start, stop).length for run in runs):
            yield length


def _joined(pairs: Iterable[tuple[TokenRun, TokenRun]]) -> list[tuple[TokenRun, TokenRun]]:
    """Join pairs with the same second run where their first runs lie side by side. Without a window, how far apart
    tokens are does not matter."""
    found: list[tuple[TokenRun, TokenRun]] = []
    for run, other in sorted(pairs, key=lambda pair: (pair[1], pair[0])):
        if found and found[-1][1] == other and found[-1][0].stop == run.start:
            run = TokenRun(found.pop()[0].start, run.stop)
        found.append((run, other))
    return found
