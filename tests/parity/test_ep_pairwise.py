"""Mixtures of experts and expert parallelism in float64: every pair of settings that they meet, on 2, 4 and 8 ranks."""

from __future__ import annotations

import pytest

from shardwise.prove.pool import RankPool
from tests.covering import Pair
from tests.parity import drawn
from tests.parity.mixtures import CASES, EVERY, MODELS, Case
from tests.parity.test_fp64 import holds

STEPS = 2
"""The second's moments are of two gradients."""
FEW = {(case.model, case.ep, case.strategy, case.remat): case for case in CASES if case.plan.layout.world <= 4}


def test_every_pair_is_met() -> None:
    met = set[Pair]().union(*(case.pairs() for case in CASES))
    assert met == set[Pair]().union(*(case.pairs() for case in EVERY))
    assert len(CASES) <= 40
    assert {case.plan.layout.world for case in CASES} == {2, 4, 8}
    assert len(FEW) == sum(case.plan.layout.world <= 4 for case in CASES)


@pytest.mark.matrix(16)
@pytest.mark.parametrize(("model", "ep", "strategy", "remat"), FEW)
def test_up_to_four_ranks(ranks: RankPool, model: str, ep: int, strategy: str, remat: str) -> None:
    prove(ranks, [FEW[model, ep, strategy, remat]])


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", MODELS)
def test_eight_ranks(eight: RankPool, model: str) -> None:
    prove(eight, [case for case in CASES if case.model == model and case.plan.layout.world == 8])


def prove(pool: RankPool, cases: list[Case]) -> None:
    """All of one model."""
    plans = [case.plan for case in cases]
    if plans:
        holds(drawn.prove(pool, cases[0].spec, plans, STEPS), plans)
