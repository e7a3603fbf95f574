"""Models and plans whose products are in float8, with whole blocks of 128 on two ranks of tensor parallelism, in
float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.models.config import ModelSpec, model_spec, with_fields
from shardwise.spec.layout import Layout, least_dp_shard
from shardwise.spec.plan import Batch, Lora, Pipeline, Plan, Remat, Shard
from tests.parity.cases import FP64, ROWS, SEQ_LEN

SPEC = model_spec("tiny-float8", 67, 256, 512, 3, 2, 2, 128, initializer_range=0.1)
BIASED = with_fields(SPEC, name="tiny-float8-biased", attention_bias=True, mlp_bias=True)
EXPERTS = with_fields(
    SPEC,
    name="tiny-float8-experts",
    num_experts=4,
    experts_per_token=2,
    expert_size=128,
    expert_bias=True,
    shared_expert_size=256,
    dense_layers=(1,),
)
FLOAT8 = replace(FP64, products="float8", exclude=("first",))
ROW = replace(FLOAT8, scales="row", exclude=("last", "*.up"))
MX = replace(FLOAT8, scales="mx")
ADAPTERS = Lora(4, 8.0, frozen="fp64")
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "one": (Layout(), {}),
    "dp": (Layout(dp_replicate=2), {}),
    "shards": (Layout(dp_shard=2), {}),
    "hsdp": (Layout(dp_replicate=2, dp_shard=2), {}),
    "tp": (Layout(tp=2), {}),
    "tp, sequence": (Layout(dp_shard=2, tp=2), {"sequence_parallel": True}),
    "pp": (Layout(pp=2), {"pipeline": Pipeline("1f1b", 1, (2, 1))}),
    "cp": (Layout(cp=2), {}),
}
SPREAD: dict[str, tuple[Layout, dict[str, Any]]] = {
    "one": LAYOUTS["one"],
    "tp": LAYOUTS["tp"],
    "ep": (Layout(dp_shard=2, ep=2), {}),
    "ep, replicas": (Layout(dp_replicate=2, dp_shard=2, ep=2), {}),
    "ep, tp": (Layout(dp_shard=2, tp=2, ep=2), {"sequence_parallel": True}),
    "ep over all": (Layout(dp_shard=2, tp=2, ep=4), {"sequence_parallel": True}),
}
"""Of mixtures."""
SHARDED: dict[str, tuple[Layout, dict[str, Any]]] = {
    "stages of shards": (Layout(pp=2, dp_shard=2), LAYOUTS["pp"][1]),
    "ep, shards": (Layout(dp_shard=4, ep=2), {}),
}
EVERY = LAYOUTS | SPREAD | SHARDED


def plan_of(
    layout: str,
    strategy: str = "ddp",
    remat: str = "none",
    accumulation: int = 1,
    lora: Lora | None = None,
    **more: Any,
) -> Plan:
    ranks, settings = EVERY[layout]
    batch = Batch(ROWS // accumulation // ranks.dp, accumulation, SEQ_LEN, loss_chunk_tokens=7)
    shard = Shard(strategy, bucket_bytes=4096)  # type: ignore[arg-type]
    plan = Plan(ranks, batch, shard, FLOAT8, Remat(remat), lora=lora, **settings)  # type: ignore[arg-type]
    return replace(plan, **more)


def legal(layout: str, strategy: str, remat: str, accumulation: int, *rest: Any) -> bool:
    """Say whether there is something to shard over, and work for all stages."""
    ranks = EVERY[layout][0]
    shards = ranks.dp_shard > least_dp_shard(ranks) if strategy == "ddp" else ranks.dp_shard > 1
    return shards == (strategy != "ddp") and accumulation >= ranks.pp


def spec_of(lora: Lora | None) -> ModelSpec:
    return SPEC if lora else BIASED
