"""Compiled blocks under tensor parallelism: the same numbers, gradients among them. (Where layers hand on DTensors
whose gather is still under way, a compiled block loses gradients in silence; ours hand on plain tensors.)"""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch._dynamo.utils import counters

from shardwise.models.config import ModelSpec
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.spec.plan import Lora, Plan
from tests.parity import drawn
from tests.parity.cases import GEMMA, TIED
from tests.parity.test_fp64 import holds
from tests.parity.test_tp import EVEN, QWEN_EVEN, plan
from tests.parity.test_tp_adapters import OLMO

pytestmark = [pytest.mark.prove, pytest.mark.timeout(300)]


def trained(rank: int, world: int, spec: ModelSpec, of: Plan) -> tuple[parity.Trace, int, int]:
    """With how many graphs were made, and how often one was broken."""
    counters.clear()
    with drawn.drawn():
        trace = parity.train(rank, spec, of, 2)
    return trace, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def compiled_holds(ranks: RankPool, spec: ModelSpec, of: Plan) -> None:
    of = replace(of, compile=True)
    found = ranks.run(trained, spec, of, world=of.layout.world, timeout_s=200)
    assert all(graphs > 0 and breaks == 0 for _, graphs, breaks in found)
    right = drawn.plain(parity.job_of(spec, of, 2))
    holds([parity.compare(right, [trace for trace, *_ in found])], [of])


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_two_ranks(ranks: RankPool, sequence: bool) -> None:
    compiled_holds(ranks, EVEN, plan("ddp", 1, 2, sequence=sequence))


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_beside_zero3(ranks: RankPool, remat: str) -> None:
    compiled_holds(ranks, EVEN, plan("zero3", 2, 2, sequence=True, remat=remat, accumulation=2))


@pytest.mark.parametrize("spec", [GEMMA, QWEN_EVEN, OLMO, TIED], ids=lambda spec: spec.name)
def test_models(ranks: RankPool, spec: ModelSpec) -> None:
    compiled_holds(ranks, spec, plan("ddp", 1, 2, sequence=True, remat="selective"))


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("dora", [False, True], ids=["plain", "dora"])
def test_adapters(ranks: RankPool, dora: bool, sequence: bool) -> None:
    of = plan("ddp", 1, 2, sequence=sequence)
    compiled_holds(ranks, EVEN, replace(of, lora=Lora(4, 8.0, frozen="fp64", dora=dora)))
