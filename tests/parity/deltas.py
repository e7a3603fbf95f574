"""Tiny models of gated delta nets and attention, and the layouts in which they are proved."""

from __future__ import annotations

from shardwise.models.config import ModelSpec, with_fields
from shardwise.models.delta_families import RECURRENT
from shardwise.models.family import FULL
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Lora, Offload, Pipeline, Plan, Remat
from tests.parity.cases import UNTIED
from tests.parity.mixtures import QWEN2
from tests.parity.routers import plan

NEXT = with_fields(
    QWEN2,
    name="tiny-qwen3-next",
    num_hidden_layers=3,
    layer_types=(RECURRENT, FULL, RECURRENT),
    attention_bias=False,
    attention_output_bias=None,
    attention_gate=True,
    qk_norm="head",
    norm_plus_one=True,
    partial_rotary_factor=0.5,
    normalised_top_k=True,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=4,
    linear_value_head_dim=3,
    linear_conv_kernel_dim=3,
)
"""A row is more than a block of chunks."""
DENSE = with_fields(
    UNTIED,
    name="tiny-qwen3.5",
    intermediate_size=28,
    layer_types=(RECURRENT, RECURRENT, FULL),
    attention_gate=True,
    qk_norm="head",
    norm_plus_one=True,
    tie_word_embeddings=True,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=3,
    linear_value_head_dim=5,
)

V = {"accumulation": 4, "pipeline": Pipeline("zbv", 2, (1, 1, 1, 1)), "remat": Remat("selective")}
PLANS = {
    "zero3": plan(Layout(dp_shard=2), "zero3", remat=Remat("selective")),
    "ddp": plan(Layout(dp_replicate=2), remat=Remat("full")),
    "zero1": plan(Layout(dp_shard=2), "zero1"),
    "tp": plan(Layout(tp=2), length=15, remat=Remat("selective")),
    "ep x tp": plan(Layout(tp=2, ep=2)),
    "pp": plan(Layout(pp=2), accumulation=4, pipeline=Pipeline("1f1b", 1, (2, 1))),
    "zbv": plan(Layout(pp=2, v_shaped=True), **V),  # type: ignore[arg-type]
    "host": plan(Layout(dp_shard=2), "zero3", offload=Offload("host", "host", "host"), remat=Remat("full")),
    "adapters, tp": plan(Layout(tp=2), lora=Lora(2, 6.0, frozen="fp64")),
    "adapters, zero3": plan(Layout(dp_shard=2), "zero3", lora=Lora(2, 6.0, frozen="fp64")),
}
OF_DENSE = ("zero3", "tp", "pp", "adapters, tp")
CASES = {
    **{f"mixture, {name}": (NEXT, of) for name, of in PLANS.items()},
    **{f"dense, {name}": (DENSE, PLANS[name]) for name in OF_DENSE},
}


def case(name: str) -> tuple[ModelSpec, Plan]:
    """The model, of four blocks for a V, and the plan."""
    spec, of = CASES[name]
    more = {"num_hidden_layers": 4, "layer_types": (*spec.attention.layer_types, FULL)}
    return (with_fields(spec, **more) if of.layout.v_shaped else spec), of
