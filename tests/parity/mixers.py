"""Tiny models with latent attention, and the layouts in which they are proved."""

from __future__ import annotations

from shardwise.models.config import ModelSpec, with_fields
from shardwise.models.rope import RopeScaling
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Lora, Offload, Pipeline, Plan, Remat
from tests.parity.cases import UNTIED
from tests.parity.mixtures import QWEN2
from tests.parity.routers import plan

DEEPSEEK = with_fields(
    QWEN2,
    name="tiny-deepseek-v2",
    num_hidden_layers=3,
    dense_layers=(0,),
    shared_expert_gate=False,
    attention_output_bias=None,
    mixer="latent",
    num_key_value_heads=8,
    head_dim=14,
    kv_lora_rank=10,
    q_lora_rank=9,
    qk_rope_head_dim=6,
    qk_nope_head_dim=8,
    v_head_dim=12,
    attention_scale=0.4,
    rope_scaling=RopeScaling("yarn", 4.0, original_max_position_embeddings=8, mscale_all_dim=1.0),
)
"""Values are narrower than keys."""
DENSE = with_fields(
    UNTIED,
    name="tiny-latent",
    intermediate_size=28,
    mixer="latent",
    num_key_value_heads=4,
    head_dim=10,
    kv_lora_rank=11,
    qk_rope_head_dim=4,
    qk_nope_head_dim=6,
    v_head_dim=10,
    rope_interleave=False,
)
"""Values are as wide as keys, and queries are made of the token itself."""


V = {"accumulation": 4, "pipeline": Pipeline("zbv", 2, (1, 1, 1, 1)), "remat": Remat("selective")}
PLANS = {
    "zero3": plan(Layout(dp_shard=2), "zero3", remat=Remat("selective")),
    "ddp": plan(Layout(dp_replicate=2), remat=Remat("full")),
    "tp": plan(Layout(tp=2), length=15, remat=Remat("selective")),
    "ep x tp": plan(Layout(tp=2, ep=2)),
    "pp": plan(Layout(pp=2), accumulation=4, pipeline=Pipeline("1f1b", 1, (2, 1))),
    "ring": plan(Layout(cp=2)),
    "gather": plan(Layout(cp=2), cp_kind="gather"),
    "ulysses": plan(Layout(cp=2, ulysses=2), "zero3", cp_kind="ulysses"),
    "zbv": plan(Layout(pp=2, v_shaped=True), **V),  # type: ignore[arg-type]
    "host": plan(Layout(dp_shard=2), "zero3", offload=Offload("host", "host", "host"), remat=Remat("full")),
    "adapters, tp": plan(Layout(tp=2), lora=Lora(3, 6.0, frozen="fp64")),
    "adapters, zero3": plan(Layout(dp_shard=2), "zero3", lora=Lora(3, 6.0, frozen="fp64")),
}
OF_DENSE = ("tp", "ring", "ulysses", "adapters, tp")
"""Where what is equal in width, and queries without a latent, take another path."""
CASES = {
    **{f"mixture, {name}": (DEEPSEEK, of) for name, of in PLANS.items()},
    **{f"dense, {name}": (DENSE, PLANS[name]) for name in OF_DENSE},
}


def case(name: str) -> tuple[ModelSpec, Plan]:
    """The model, of four blocks for a V, and the plan."""
    spec, of = CASES[name]
    return (with_fields(spec, num_hidden_layers=4) if of.layout.v_shaped else spec), of
