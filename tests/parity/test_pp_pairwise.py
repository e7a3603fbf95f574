"""Pipelines in float64: every pair of settings that one meets, on 2, 4 and 8 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.prove.pool import RankPool
from shardwise.spec.pipelines import PIPELINES
from tests.parity import drawn, test_dpo
from tests.parity.pipes import CASES, EVERY, MODELS, Case
from tests.parity.test_fp64 import holds

STEPS = 2
"""The second's moments are of two gradients."""
FEW = {(case.schedule, case.model, case.strategy): case for case in CASES if case.plan.layout.world <= 4}


def test_every_pair_is_met() -> None:
    met = set().union(*(case.pairs() for case in CASES))
    assert met == set().union(*(case.pairs() for case in EVERY))
    assert len(CASES) <= len(PIPELINES) * len(MODELS) + 4  # at least each schedule with each model
    assert {case.plan.layout.world for case in CASES} == {2, 4, 8}
    assert len(FEW) == sum(case.plan.layout.world <= 4 for case in CASES)


@pytest.mark.matrix(12)
@pytest.mark.parametrize(("schedule", "model", "strategy"), FEW)
def test_up_to_four_ranks(ranks: RankPool, pairs: Path, schedule: str, model: str, strategy: str) -> None:
    prove(ranks, pairs, [FEW[schedule, model, strategy]])


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", MODELS)
def test_eight_ranks(eight: RankPool, pairs: Path, model: str) -> None:
    prove(eight, pairs, [case for case in CASES if case.model == model and case.plan.layout.world == 8])


def prove(pool: RankPool, directory: Path, cases: list[Case]) -> None:
    """All of one kind of model."""
    for spec in dict.fromkeys(case.spec for case in cases):
        plans = [case.plan for case in cases if case.spec == spec]
        if cases[0].model == "pairs":
            test_dpo.holds(pool, directory, plans, spec, STEPS)
        else:
            holds(drawn.prove(pool, spec, plans, STEPS), plans)
