"""Compiled blocks with experts: no graph breaks, the losses of routers reach the gradients, and each token is counted
once, also where a block is computed again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch._dynamo.utils import counters

from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.runtime.step import StepStats
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Plan
from tests.parity import drawn, experts
from tests.parity.experts import FULL, MOE, SELECTIVE, plan
from tests.parity.test_experts import agrees
from tests.parity.test_fp64 import holds

CASES = {
    "tp": plan(Layout(tp=2), accumulation=2, remat=FULL),
    "cp": plan(Layout(cp=2), accumulation=2, remat=SELECTIVE),
}


def trained(rank: int, world: int, of: Plan) -> tuple[parity.Trace, list[StepStats], int, int]:
    """With how many graphs were made, and how often one was broken."""
    counters.clear()
    trace = parity.take_steps(rank, MOE, of, 2, setting=drawn.RANDOM)
    [stats] = experts.counted(rank, world, [of])
    return trace, stats, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.big
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CASES)
def test_compiled(ranks: RankPool, name: str) -> None:
    of = replace(CASES[name], compile=True)
    found = ranks.run(trained, of, world=2)
    assert all(graphs > 0 and breaks == 0 for *_, graphs, breaks in found)
    right = drawn.plain(parity.job_of(MOE, of, 2))
    holds([parity.compare(right, [trace for trace, *_ in found])], [of])
    for _, stats, *_ in found:
        agrees(stats[0], of)
