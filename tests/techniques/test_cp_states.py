"""Gated delta nets whose rows are on several ranks are those of one process, whoever has which pieces."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from shardwise.prove.pool import RankPool
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan
from shardwise.spec.rows import RowShare, WholeRows
from shardwise.techniques import cp
from shardwise.techniques.cp.delta_states import line_of
from tests.parity.mixers import NEXT
from tests.said import shows
from tests.techniques import cp_state_ranks
from tests.techniques.cp_state_ranks import Cut, error

ODD = (0, 1, 20, 23, 48, 49, 60, 61, 90, 96)
"""Documents of two rows of 48: of one token, within a piece, over borders of pieces, from the first piece to the
last."""
AT_BORDERS = (0, 12, 24, 36, 48, 72, 84, 96)
"""Documents that begin where pieces do."""
ROWS: dict[str, dict[str, Any]] = {
    "whole": {},
    "documents": {"bounds": ODD, "each": 2},
    "at borders": {"bounds": AT_BORDERS},
    "no sums": {"bounds": ODD, "taps": 1},
}
KINDS: dict[str, tuple[Any, int, int]] = {
    "ring of 2": ("ring", 2, 1),
    "gathered": ("gather", 2, 1),
    "heads": ("ulysses", 2, 2),
    "ring of 3": ("ring", 3, 1),
    "three for heads": ("ulysses", 3, 3),
    "ring of 4": ("ring", 4, 1),
    "nested": ("nested", 4, 2),
}


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.prove) for n in (3, 4))])
def test_it_is_the_net_of_one_process(ranks: RankPool, world: int) -> None:
    """Output and all gradients, in float64, to 1e-12."""
    cuts = [
        Cut(kind, n, ulysses, **rows)
        for (kind, n, ulysses), rows in product(KINDS.values(), ROWS.values())
        if n == world
    ]
    answers = ranks.run(cp_state_ranks.own, cuts, world=world)
    for number, one in enumerate(cuts):
        found = error(one, [answer[number] for answer in answers])
        assert max(found.values()) < 1e-12, f"{one}: {found}"


@pytest.mark.parametrize("ring,ulysses", [(1, 4), (4, 1), (2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("bounds", [None, ODD])
def test_pieces_are_in_the_order_of_the_row(ring: int, ulysses: int, bounds: tuple[int, ...] | None) -> None:
    """Every token is in one piece, those of a rank are what it holds, and documents start where they do in the row."""
    rows, found = WholeRows(48, bounds), dict[int, list[int]]()
    for rank in range(ring * ulysses):
        line, share = line_of(rows, 2, ring, ulysses, rank), RowShare(ring, ulysses, rank)
        starts = line.starts(0, line.size)
        assert (starts is None) == (bounds is None)
        for row, places in enumerate(line.places):
            firsts = [first for first, _ in places]
            assert firsts == list(range(0, 48, line.size))
            own = [range(first, first + line.size) for first, (holder, _) in places if holder == rank]
            assert [t for each in own for t in each] == [t for run in share.runs(rows, row) for t in range(*run)]
            found.setdefault(row, []).extend(t for each in own for t in each)
            tokens = [row * 48 + t for each in own for t in each]
            at = row * len(tokens)
            wanted = [at + i for i, token in enumerate(tokens) if token in ODD]
            assert starts is None or [s for s in starts if at <= s < at + len(tokens)] == wanted
    assert all(sorted(tokens) == list(range(48)) for tokens in found.values())


@pytest.mark.parametrize("length", [4, 6])
def test_pieces_that_are_shorter_than_what_is_added_up_are_refused_once(length: int) -> None:
    plan = Plan(Layout(cp=2), Batch(1, 1, length))
    [problem] = cp.check(NEXT, plan, parse_cluster("2xH100"))
    assert problem.code == "PLAN026" and shows(problem.fix, "multiple of 4", "8 or more")
    assert not cp.check(NEXT, replace(plan, batch=Batch(1, 1, 8)), parse_cluster("2xH100"))
