"""Compiled blocks under tensor parallelism: the same numbers, gradients among them. (Where layers hand on DTensors
whose gather is still under way, a compiled block loses gradients in silence; ours hand on plain tensors.)"""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch._dynamo.utils import counters

from shardwise.models.config import ModelSpec
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.prove.workload import Setting
from shardwise.spec.plan import Lora, Plan
from tests.drift.compiled import compiler
from tests.parity import drawn
from tests.parity.cases import GEMMA, TIED
from tests.parity.test_fp64 import holds
from tests.parity.test_tp import EVEN, QWEN_EVEN, plan
from tests.parity.test_tp_adapters import OLMO

pytestmark = pytest.mark.timeout(300)


def trained(
    rank: int, world: int, spec: ModelSpec, of: Plan, setting: Setting = drawn.RANDOM, backend: str = "inductor"
) -> tuple[parity.Trace, int, int]:
    """With how many graphs were made, and how often one was broken."""
    counters.clear()
    with compiler(backend):
        trace = parity.take_steps(rank, spec, of, 2, setting=setting)
    return trace, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def compiled_holds(ranks: RankPool, spec: ModelSpec, of: Plan, backend: str) -> None:
    of = replace(of, compile=True)
    found = ranks.run(trained, spec, of, drawn.RANDOM, backend, world=of.layout.world)
    assert all(graphs > 0 and breaks == 0 for _, graphs, breaks in found)
    right = drawn.plain(parity.job_of(spec, of, 2))
    holds([parity.compare(right, [trace for trace, *_ in found])], [of])


ADAPTERS = Lora(4, 8.0, frozen="fp64")
CASES: dict[str, tuple[ModelSpec, Plan]] = {
    "whole": (EVEN, plan("ddp", 1, 2, sequence=False)),
    "zero3": (EVEN, plan("zero3", 2, 2, sequence=True, remat="full", accumulation=2)),
    "dora": (EVEN, replace(plan("ddp", 1, 2, sequence=True), lora=replace(ADAPTERS, dora=True))),
    "norms over projections": (OLMO, plan("ddp", 1, 2, sequence=True, remat="selective")),
}
"""Both strategies and ways of splitting the stream, every way of recomputing, adapters, and norms that send."""
MORE: dict[str, tuple[ModelSpec, Plan]] = {
    "gemma": (GEMMA, plan("ddp", 1, 2, sequence=True, remat="selective")),
    "sequence": (EVEN, plan("ddp", 1, 2, sequence=True)),
    "qwen": (QWEN_EVEN, plan("ddp", 1, 2, sequence=True, remat="selective")),
    "tied": (TIED, plan("ddp", 1, 2, sequence=True, remat="selective")),
    "zero3, none": (EVEN, plan("zero3", 2, 2, sequence=True, accumulation=2)),
    "zero3, selective": (EVEN, plan("zero3", 2, 2, sequence=True, remat="selective", accumulation=2)),
    "adapters, whole": (EVEN, replace(plan("ddp", 1, 2, sequence=False), lora=ADAPTERS)),
    "adapters, sequence": (EVEN, replace(plan("ddp", 1, 2, sequence=True), lora=ADAPTERS)),
    "dora, whole": (EVEN, replace(plan("ddp", 1, 2, sequence=False), lora=replace(ADAPTERS, dora=True))),
}


@pytest.mark.prove
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_plan(ranks: RankPool, name: str) -> None:
    """Gradients are lost where graphs are made, and not where code is made of them, which takes a minute."""
    compiled_holds(ranks, *CASES[name], "aot_eager")


@pytest.mark.big
@pytest.mark.parametrize("name", CASES | MORE)
def test_code_of_compiled_plans(ranks: RankPool, name: str) -> None:
    compiled_holds(ranks, *(CASES | MORE)[name], "inductor")
