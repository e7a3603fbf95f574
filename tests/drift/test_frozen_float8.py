"""Adapters over frozen weights in float8: what plans send, hold and save is what was predicted, of matrices with blocks
that are cut, and smaller ones at their edges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.models.config import ModelSpec, model_spec
from shardwise.prove.drift import PEAK_FROM_BYTES, drift
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Offload, Pipeline, Plan, Precision, Remat, Shard
from tests.drift.test_expert_adapters import MIX
from tests.drift.test_expert_adapters import PLANS as OF_EXPERTS
from tests.drift.test_float8 import MIXTURE, plan_of
from tests.drift.test_float8 import SPEC as OF_PRODUCTS

LORA = Lora(4, 8.0, frozen="bf16", float8=True)
SPEC = model_spec("blocks", 600, 160, 416, 2, 8, 2, 40, attention_bias=True)
"""Of one to eight blocks in a matrix."""
SOME = replace(LORA, targets=("q", "down"))
BF16 = Precision("bf16")


def plan(layout: Layout, strategy: str, remat: str = "none", m: int = 1, lora: Lora = LORA) -> Plan:
    shard = Shard(strategy, bucket_bytes=100_000)  # type: ignore[arg-type]
    return Plan(layout, Batch(2, m, 32, 40), shard, BF16, Remat(remat), sequence_parallel=layout.tp > 1, lora=lora)  # type: ignore[arg-type]


PLANS: dict[str, tuple[ModelSpec, Plan]] = {
    "ddp": (SPEC, plan(Layout(dp_replicate=8), "ddp", "full", 2)),
    "zero1": (SPEC, plan(Layout(dp_shard=8), "zero1", "selective")),
    "zero3": (SPEC, plan(Layout(dp_shard=8), "zero3", "full", lora=replace(LORA, dora=True, dropout=0.1))),
    "tp": (SPEC, plan(Layout(tp=2), "ddp", "full", lora=replace(LORA, dora=True))),
    "tp and zero3": (SPEC, plan(Layout(tp=8, dp_shard=2), "zero3", "selective")),
    "cp": (SPEC, plan(Layout(cp=2), "zero3")),
    "pp": (SPEC, replace(plan(Layout(pp=2, dp_shard=2), "zero3", m=4), pipeline=Pipeline("1f1b", split=(1, 1)))),
    "on the host": (SPEC, replace(plan(Layout(dp_shard=2), "zero3"), offload=Offload(weights="host"))),
    "some layers, fp32": (SPEC, replace(plan(Layout(dp_shard=2), "zero3", lora=SOME), precision=Precision())),
    "products in float8": (OF_PRODUCTS, replace(plan_of("tp, sequence", "all", "none", ""), lora=LORA)),
    "products of experts in float8": (MIXTURE, replace(plan_of("ep", "all", "full", ""), lora=LORA)),
    **{f"experts, {name}": (MIX, replace(OF_EXPERTS[name], lora=LORA)) for name in ("ep and tp", "ddp", "zero3", "pp")},
}


@pytest.mark.matrix(6)
@pytest.mark.parametrize("case", PLANS)
def test_plans(case: str) -> None:
    spec, of = PLANS[case]
    assert drift(spec, of, of.layout.world - 1).differences() == []


@pytest.mark.prove
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_the_peak_of_a_large_model(strategy: str) -> None:
    """Above 1 GiB, where the peak too is among the differences when it is not within 3 %: no matrix is kept as it is
    multiplied by."""
    spec = model_spec("large", 32_000, 2048, 5632, 3, 16, 8, 128)
    of = Plan(Layout(dp_shard=8) if strategy == "zero3" else Layout(dp_replicate=8), Batch(2, 1, 2048, 1024))
    of = replace(of, shard=Shard(strategy), precision=BF16, lora=replace(LORA, rank=16))  # type: ignore[arg-type]
    found = drift(spec, of, 0)
    assert found.measured.peak_bytes >= PEAK_FROM_BYTES and not found.differences()
