"""Every pair of settings that tensor parallelism meets, in float64 on up to 8 ranks, which share one pool."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from tests.parity.pairwise import EVERY, LAYOUTS, MODELS, Case, covering
from tests.parity.test_fp64 import holds

CASES = covering()


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    with RankPool(8) as pool:
        yield pool


def test_every_pair_is_met() -> None:
    met = set().union(*(case.pairs() for case in CASES))
    assert len(CASES) >= LAYOUTS
    assert met == set().union(*(case.pairs() for case in EVERY))
    assert {case.tp for case in CASES} == {2, 4, 8}


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", MODELS)
def test_layouts(eight: RankPool, model: str) -> None:
    cases: list[Case] = [case for case in CASES if case.model == model]
    for case in cases:
        print(case)
    holds(parity.prove(eight, cases[0].spec, [case.plan for case in cases], steps=5), [case.plan for case in cases])
