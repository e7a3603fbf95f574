"""Context parallelism in float64: every pair of settings that it meets, on 2, 4 and 8 ranks, of rows of packed
documents that borders of pieces cut anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.prove.pool import RankPool
from tests.parity import drawn, test_dpo
from tests.parity.rings import CASES, EVERY, MODELS, Case
from tests.parity.test_fp64 import holds

STEPS = 2
"""The second's moments are of two gradients."""
FEW = {(case.kind, case.model, case.cp, case.strategy): case for case in CASES if case.plan.layout.world <= 4}


def test_every_pair_is_met() -> None:
    met = set().union(*(case.pairs() for case in CASES))
    assert met == set().union(*(case.pairs() for case in EVERY))
    assert len(CASES) <= 40
    assert {case.plan.layout.world for case in CASES} == {2, 4, 8}
    assert len(FEW) == sum(case.plan.layout.world <= 4 for case in CASES)


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "model", "cp", "strategy"), FEW)
def test_up_to_four_ranks(ranks: RankPool, pairs: Path, kind: str, model: str, cp: int, strategy: str) -> None:
    prove(ranks, pairs, [FEW[kind, model, cp, strategy]])


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", MODELS)
def test_eight_ranks(eight: RankPool, pairs: Path, model: str) -> None:
    prove(eight, pairs, [case for case in CASES if case.model == model and case.plan.layout.world == 8])


def prove(pool: RankPool, directory: Path, cases: list[Case]) -> None:
    """All of one model."""
    plans = [case.plan for case in cases]
    if plans and cases[0].model == "pairs":
        test_dpo.holds(pool, directory, plans, cases[0].spec, STEPS)
    elif plans:
        holds(drawn.prove(pool, cases[0].spec, plans, STEPS), plans)
