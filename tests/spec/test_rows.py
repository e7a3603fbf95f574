"""Which tokens ranks have of a row, and what of them sees what, beside every pair of a query and a key by itself."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise, product

import pytest

from shardwise.spec.rows import Hop, RowShare, WholeRows, held, hops, needs, parts_of, sights


def tokens(share: RowShare, rows: WholeRows, row: int = 0) -> list[int]:
    return [token for run in share.runs(rows, row) for token in range(*run)]


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (1, 4), (2, 1), (4, 1), (3, 1), (2, 2), (3, 4), (2, 3), (4, 2)])
def test_every_token_is_one_rank_s(ring: int, ulysses: int) -> None:
    """As many on each, in the order of the row."""
    length = 2 * parts_of(ring, ulysses)
    bounds = (0, 1, length - 2, length, length + 3, 2 * length)
    for rows, row in product((WholeRows(length), WholeRows(length, bounds)), (0, 1)):
        each = [tokens(RowShare(ring, ulysses, rank), rows, row) for rank in range(ring * ulysses)]
        assert sorted(token for own in each for token in own) == list(range(length))
        assert {len(own) for own in each} == {length // (ring * ulysses)}
        assert all(own == sorted(own) for own in each)


def test_a_row_of_one_document_is_cut_zigzag() -> None:
    assert [tokens(RowShare(4, 1, rank), WholeRows(8)) for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


def test_ranks_with_heads_share_the_pieces_of_a_ring() -> None:
    """Two neighbours have the first and the last piece, two others those between."""
    assert [tokens(RowShare(2, 2, rank), WholeRows(8)) for rank in range(4)] == [[0, 1], [6, 7], [2, 3], [4, 5]]


def test_work_is_even_by_what_is_seen() -> None:
    """Of a long document before short ones: its last quarter, which sees most, goes with them, which see least. By
    position one rank would have six times the work of the other."""
    rows = WholeRows(64, (0, *range(48, 66, 2)))
    assert [tokens(RowShare(2, 1, rank), rows) for rank in range(2)] == [[*range(32, 64)], [*range(32)]]

    def seen(token: int) -> int:
        return token - max(bound for bound in rows.bounds or () if bound <= token) + 1

    work = [sum(map(seen, tokens(RowShare(2, 1, rank), rows))) for rank in range(2)]
    assert max(work) < 1.3 * min(work)


def visible(length: int, ends: tuple[int, ...], *, causal: bool, window: int | None) -> set[tuple[int, int]]:
    document = [number for number, (start, stop) in enumerate(pairwise((0, *ends))) for _ in range(start, stop)]
    return {
        (query, key)
        for query, key in product(range(length), repeat=2)
        if document[query] == document[key]
        and (key <= query or not causal)
        and (window is None or abs(query - key) < window)
    }


def drawn(seed: int) -> tuple[WholeRows, int, bool, int | None]:
    draw = random.Random(seed)
    ring = draw.choice((1, 2, 3, 4))
    length = 2 * ring * draw.randint(1, 5)
    cuts = sorted(draw.sample(range(1, length), min(length - 1, draw.randint(0, 4))))
    rows = WholeRows(length, (0, *cuts, length) if cuts or draw.random() < 0.5 else None)
    return rows, ring, draw.random() < 0.7, draw.choice((None, 1, 2, 3, 7, 50))


@pytest.mark.parametrize("seed", range(200))
def test_each_pair_is_seen_once(seed: int) -> None:
    """Whatever documents, window and ranks: what runs of queries see of runs of keys is what each query may see; each
    of them sees something, and each key is seen."""
    rows, ring, causal, window = drawn(seed)
    right, found = visible(rows.length, rows.ends(0), causal=causal, window=window), Counter[tuple[int, int]]()
    row_keys = [{key for key in range(rows.length) if (query, key) in right} for query in range(rows.length)]
    runs = [run for own in held(rows, 0, ring) for run in own]
    for queries, keys in product(runs, repeat=2):
        for sight in sights(queries, keys, rows.ends(0), causal=causal, window=window):
            assert {key for query in range(*sight.queries) for key in row_keys[query]} >= {*range(*sight.keys)}
            for query in range(*sight.queries):
                own = {(query, key) for key in range(*sight.keys) if (query, key) in right}
                far = window is not None or sight.own
                assert own and (far or len(own) == sight.keys.length)
                found.update(own)
    assert found.keys() == right and set(found.values()) == {1}


@pytest.mark.parametrize("seed", range(200))
def test_what_one_rank_sends_another_takes(seed: int) -> None:
    """Step by step: keys come from a rank that has them, sums of gradients from one that has begun them, and home they
    come once from every rank that was the last to see them. Nothing goes to a rank that sees nothing of it."""
    rows, ring, causal, window = drawn(seed)
    seen = needs(rows, 1, ring, causal, window)
    each: list[tuple[Hop, ...]] = [hops(seen, rank) for rank in range(ring)]
    home = Counter[int]()
    for step in range(ring):
        keys: dict[tuple[int, int], int] = {}
        sums: dict[tuple[int, int], int] = {}
        for rank in range(ring):
            hop, holds = each[rank][step], (rank - step) % ring
            keys |= {(to, of): rank for to, of in ((hop.held_to, holds), (hop.own_to, rank)) if to is not None}
            if hop.sums_to is not None:
                assert seen[rank][holds]
                sums[hop.sums_to, holds] = rank
        for rank in range(ring):
            hop = each[rank][step]
            if hop.keys_from is not None:
                assert seen[rank][hop.owner] and keys.pop((rank, hop.owner)) == hop.keys_from
            if hop.sums_from is not None:
                assert sums.pop((rank, hop.owner)) == hop.sums_from
            if hop.home_from is not None:
                assert sums.pop((rank, rank)) == hop.home_from
                home[rank] += 1
        assert not keys and not sums
    for rank in range(ring):
        others = [(rank + step) % ring for step in range(1, ring)]
        assert (home[rank] == 0) == (not any(seen[other][rank] for other in others))
