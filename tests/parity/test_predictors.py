"""A layer that predicts a further token, trained with its model: N ranks are one process. And faults in it, planted into
the ranks' code, which parity sees."""

from __future__ import annotations

from itertools import product

import pytest

from shardwise.prove.pool import RankPool
from tests.parity import drawn
from tests.parity.predictors import MODELS, PLANS, serves
from tests.parity.test_fp64 import holds

CASES = [case for case in product(PLANS, MODELS) if serves(*case)]


@pytest.mark.matrix(8)
@pytest.mark.parametrize(("name", "model"), CASES)
def test_ranks_are_one_process(ranks: RankPool, name: str, model: str) -> None:
    of = PLANS[name]
    holds(drawn.prove(ranks, MODELS[model], [of], 3), [of])
