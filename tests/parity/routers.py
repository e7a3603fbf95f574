"""Tiny models with routers that choose by sigmoids, or within groups, and the layouts in which they are proved."""

from __future__ import annotations

from dataclasses import replace

from shardwise.models.config import ModelSpec, with_fields
from shardwise.models.kinds import GroupedRouting, SigmoidRouting
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Offload, Pipeline, Plan, Remat, Shard
from tests.parity.cases import FP64
from tests.parity.mixtures import MIXTRAL

GLM = with_fields(
    MIXTRAL,
    name="tiny-glm4-moe",
    num_hidden_layers=3,
    attention_bias=True,
    attention_output_bias=False,
    qk_norm="head",
    partial_rotary_factor=0.5,
    experts_per_token=3,
    shared_expert_size=24,
    dense_layers=(0,),
    sigmoid=SigmoidRouting(groups=4, kept_groups=2, scale=1.7, bias_rate=0.05),
)
MINIMAX = with_fields(
    MIXTRAL,
    name="tiny-minimax",
    num_hidden_layers=3,
    qk_norm="projection",
    router_aux_loss_coef=2.0,  # large, so that what is wrong with it shows
    sigmoid=SigmoidRouting(bias_rate=0.05),
)
GROUPED = with_fields(
    MIXTRAL,
    name="tiny-grouped",
    num_hidden_layers=3,
    experts_per_token=3,
    normalised_top_k=False,
    shared_expert_size=24,
    dense_layers=(0,),
    router_aux_loss_coef=2.0,
    softmax_groups=GroupedRouting(groups=4, kept_groups=2, scale=1.7),
)
MODELS: dict[str, ModelSpec] = {"GLM": GLM, "MiniMax": MINIMAX, "DeepSeek-V2's router": GROUPED}


def plan(layout: Layout, strategy: str = "ddp", accumulation: int = 2, length: int = 16, **more: object) -> Plan:
    return Plan(
        layout,
        Batch(max(1, 8 // accumulation // layout.dp), accumulation, length, loss_chunk_tokens=7),
        Shard(strategy, bucket_bytes=4096),  # type: ignore[arg-type]
        FP64,
        sequence_parallel=layout.tp > 1,
        **more,  # type: ignore[arg-type]
    )


def model(name: str, of: Plan) -> ModelSpec:
    """What is trained: of four blocks for a V; with adapters nothing but them changes."""
    spec = MODELS[name]
    spec = replace(spec, num_hidden_layers=4) if of.layout.v_shaped else spec
    if of.lora is not None and spec.experts.sigmoid is not None:
        spec = with_fields(spec, sigmoid=replace(spec.experts.sigmoid, bias_rate=0.0))
    return spec


FULL, SELECTIVE = Remat("full"), Remat("selective")
PLANS = {
    "zero3": plan(Layout(dp_shard=2), "zero3", remat=SELECTIVE),
    "ddp": plan(Layout(dp_replicate=2), remat=FULL),
    "hsdp": plan(Layout(dp_replicate=2, dp_shard=2), "zero3"),
    "tp": plan(Layout(tp=2), length=15, remat=SELECTIVE),
    "tp, whole stream": replace(plan(Layout(tp=2)), sequence_parallel=False),
    "zero3 x tp": plan(Layout(dp_shard=2, tp=2), "zero3"),
    "ep": plan(Layout(dp_shard=2, ep=2), "zero3", remat=FULL),
    "ep x tp": plan(Layout(tp=2, ep=2)),
    "pp": plan(Layout(pp=2), accumulation=4, pipeline=Pipeline("1f1b", 1, (2, 1))),
    "zbv": plan(
        Layout(pp=2, v_shaped=True), accumulation=4, pipeline=Pipeline("zbv", 2, (1, 1, 1, 1)), remat=SELECTIVE
    ),
    "cp": plan(Layout(cp=2)),
    "host": plan(Layout(dp_shard=2), "zero3", offload=Offload("host", "host", "host"), remat=FULL),
    "lora, tp": plan(Layout(tp=2), lora=Lora(3, 6.0, frozen="fp64")),
    "lora, zero3": plan(Layout(dp_shard=2), "zero3", lora=Lora(3, 6.0, frozen="fp64")),
}
