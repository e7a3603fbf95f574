"""Tiny models with latent attention, or gated delta nets beside attention, and the layouts in which they are proved."""

from __future__ import annotations

from dataclasses import replace

from shardwise.models.config import ModelSpec, with_fields
from shardwise.models.delta_families import RECURRENT
from shardwise.models.family import FULL
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
WIDE = with_fields(
    DENSE,
    name="tiny-wide-latent",
    hidden_size=128,
    intermediate_size=128,
    head_dim=32,
    kv_lora_rank=192,
    q_lora_rank=64,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    v_head_dim=32,
)
"""Rows are blocks of 64, and matrices that are not cut several groups of these."""
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
NETS = with_fields(
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
    "ring": plan(Layout(cp=2)),
    "gather": plan(Layout(cp=2), cp_kind="gather"),
    "ulysses": plan(Layout(cp=2, ulysses=2), "zero3", cp_kind="ulysses"),
    "zbv": plan(Layout(pp=2, v_shaped=True), **V),  # type: ignore[arg-type]
    "host": plan(Layout(dp_shard=2), "zero3", offload=Offload("host", "host", "host"), remat=Remat("full")),
    "adapters, tp": plan(Layout(tp=2), lora=Lora(3, 6.0, frozen="fp64")),
    "adapters, zero3": plan(Layout(dp_shard=2), "zero3", lora=Lora(3, 6.0, frozen="fp64")),
}
OF_LATENTS = {
    "tp, whole": replace(PLANS["tp"], sequence_parallel=False),
    "ring x tp": plan(Layout(cp=2, tp=2), remat=Remat("full")),
    "zero3 x tp": plan(Layout(dp_shard=2, tp=2), "zero3", remat=Remat("selective")),
    "zbv x tp": plan(Layout(pp=2, tp=2, v_shaped=True), **V),  # type: ignore[arg-type]
}
"""Where ranks of tp make latents, each of its own tokens or all of all."""
AGAIN = {
    "adapters, zero3": replace(PLANS["adapters, zero3"], remat=Remat("selective")),
    "adapters, tp": replace(PLANS["adapters, tp"], remat=Remat("selective")),
    "1f1b": replace(PLANS["pp"], remat=Remat("selective")),
    "ring": replace(PLANS["ring"], remat=Remat("selective")),
    "ulysses": replace(PLANS["ulysses"], remat=Remat("selective")),
    "host": replace(PLANS["host"], remat=Remat("selective")),
}
"""Heads are made of latents again."""
SMALL = plan(Layout(tp=2), lora=Lora(3, 6.0, frozen="fp64", nf4=True, dora=True), remat=Remat("selective"))
OF_DENSE = ("tp", "ring", "ulysses", "adapters, tp")
"""Where what is equal in width, and queries without a latent, take another path."""
OVER_PIECES = {
    "ring x tp": (NEXT, plan(Layout(cp=2, tp=2), remat=Remat("selective"))),
    "ring x pp": (
        NETS,
        plan(Layout(cp=2, pp=2), accumulation=4, pipeline=Pipeline("1f1b", 1, (2, 1)), remat=Remat("full")),
    ),
    "nested x zero3": (
        NETS,
        plan(Layout(cp=4, ulysses=2), "zero3", length=32, cp_kind="nested", remat=Remat("selective")),
    ),
    "adapters, gather x zero3": (
        NEXT,
        plan(
            Layout(dp_shard=2, cp=2), "zero3", cp_kind="gather", lora=Lora(3, 6.0, frozen="fp64"), remat=Remat("full")
        ),
    ),
    "ulysses x ep": (NEXT, plan(Layout(cp=2, ulysses=2, ep=2), cp_kind="ulysses", remat=Remat("selective"))),
}
"""Gated delta nets, of which states pass, beside the other axes."""
OF_NETS = ("zero3", "tp", "pp", "adapters, tp", "ring")
CASES = {
    **{f"mixture, {name}": (DEEPSEEK, of) for name, of in PLANS.items()},
    **{f"mixture, {name}": (DEEPSEEK, of) for name, of in OF_LATENTS.items()},
    **{f"mixture, {name}, selective": (DEEPSEEK, of) for name, of in AGAIN.items()},
    "dense, adapters, zero3, selective": (DENSE, AGAIN["adapters, zero3"]),
    **{f"dense, {name}": (DENSE, PLANS[name]) for name in OF_DENSE},
    "dense, tp, whole": (DENSE, OF_LATENTS["tp, whole"]),
    "wide, in 4 bits": (WIDE, SMALL),
    **{f"mixture of nets, {name}": (NEXT, of) for name, of in PLANS.items()},
    **{f"nets, {name}": (NETS, PLANS[name]) for name in OF_NETS},
    **OVER_PIECES,
}


def case(name: str) -> tuple[ModelSpec, Plan]:
    """The model, of four blocks for a V, and the plan."""
    spec, of = CASES[name]
    types = spec.attention.layer_types
    more = {"num_hidden_layers": 4, "layer_types": types and (*types, FULL)}
    return (with_fields(spec, **more) if of.layout.v_shaped else spec), of
