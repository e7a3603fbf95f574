"""Gated delta nets: N ranks are one process, and faults planted into what ranks do of them are seen."""

from __future__ import annotations

import pytest

from shardwise.prove.pool import RankPool
from tests.parity import drawn
from tests.parity.deltas import CASES, case
from tests.parity.test_fp64 import holds


@pytest.mark.matrix(8)
@pytest.mark.parametrize("name", CASES)
def test_ranks_are_one_process(ranks: RankPool, name: str) -> None:
    spec, of = case(name)
    holds(drawn.prove(ranks, spec, [of], 3), [of])
