"""Frozen weights that wait on the host: a run is bit by bit what it is without, whatever it is beside."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.prove.drift import drift
from shardwise.prove.pool import RankPool
from shardwise.spec.plan import Plan
from tests.parity import drawn
from tests.parity.fetching import CASES, PLACES, Case
from tests.parity.test_waiting import differ

STEPS = 2


def without(plan: Plan) -> Plan:
    return replace(plan, offload=replace(plan.offload, weights="none"))


def test_every_layout_is_met() -> None:
    assert {case.layout for case in CASES} == PLACES.keys() and len(CASES) <= 30


@pytest.mark.matrix(8)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bit_by_bit_what_it_is_without(ranks: RankPool, case: Case) -> None:
    """Losses, norms, first gradients, and all that each rank holds after each step."""
    plans = [case.plan, without(case.plan)]
    for found, right in ranks.run(drawn.train_on_rank, case.spec, plans, STEPS, world=case.plan.layout.world):
        assert differ(found, right) == []


@pytest.mark.matrix(6)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_held_and_copied(case: Case) -> None:
    """To the byte on both tiers, on the first rank and the last."""
    for rank in sorted({0, case.plan.layout.world - 1}):
        found = drift(case.spec, case.plan, rank)
        assert found.differences() == []
        assert found.measured.copied["host", "device"] > 0
