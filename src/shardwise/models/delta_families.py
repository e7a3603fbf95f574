"""Families of which most layers are gated delta nets, and the others attention: Qwen3-Next and Qwen3.5. Imports no
torch."""

from __future__ import annotations

from shardwise.models.expert_families import (
    IN_MEMORY,
    ONE_BY_ONE,
    SHARED_GATE,
    read_experts,
    read_sparse,
    write_experts,
    write_sparse,
)
from shardwise.models.family import (
    FULL,
    PLAIN,
    QK_NORM,
    ByHead,
    Config,
    Family,
    Fields,
    Names,
    rotated_share,
    row,
    whole,
)
from shardwise.models.rope import unsupported

RECURRENT = "linear_attention"
_ATTENTION, _DELTA = "layers.{}.attention.", "model.layers.{}.linear_attn."
_GATE: Names = {
    f"{_ATTENTION}{x}": ByHead("model.layers.{}.self_attn.q_proj", "num_attention_heads") for x in ("q", "q_gate")
}
_NET: Names = {
    **{f"{_ATTENTION}conv_{x}": f"{_DELTA}conv1d.weight" for x in "qkv"},
    f"{_ATTENTION}decay_log": f"{_DELTA}A_log",
    f"{_ATTENTION}dt_bias": f"{_DELTA}dt_bias",
    f"{_ATTENTION}head_norm": f"{_DELTA}norm",
    f"{_ATTENTION}out": f"{_DELTA}out_proj",
}
_BY_HEADS: Names = {
    f"{_ATTENTION}in_{x}": ByHead(f"{_DELTA}in_proj_{fused}", "linear_num_key_heads")
    for fused in ("qkvz", "ba")
    for x in fused
}
"""As Qwen3-Next has them: of each key head queries, keys, and its heads of values and of what they are gated by."""
_APART: Names = {
    **{f"{_ATTENTION}in_{x}": f"{_DELTA}in_proj_qkv" for x in "qkv"},
    **{f"{_ATTENTION}in_{x}": f"{_DELTA}in_proj_{x}" for x in "zba"},
}
_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def _read(config: Config, name: str) -> Fields:
    """Return the fields of both kinds of layers, which the config lists; else every fourth has attention."""
    every = 4 if config.get("full_attention_interval") is None else whole(config, "full_attention_interval", name)
    count = config["num_hidden_layers"]
    types = config.get("layer_types") or [RECURRENT if (layer + 1) % every else FULL for layer in range(count)]
    if wrong := [kind for kind in types if kind not in (RECURRENT, FULL)]:
        raise unsupported(f"layers of type {wrong[0]!r} are not supported", name, f"layer_types: {FULL} or {RECURRENT}")
    sizes = {key: whole(config, key, name) for key in _SIZES}
    share = rotated_share({"partial_rotary_factor": 0.25, **config}, name)
    return sizes | share | {"layer_types": tuple(types) if RECURRENT in types else ()}


def _write(fields: Fields) -> Config:
    types = list(fields["layer_types"]) or [FULL] * fields["num_hidden_layers"]
    return {key: fields[key] for key in (*_SIZES, "partial_rotary_factor")} | {"layer_types": types}


def _qwen3_next(config: Config, name: str) -> Fields:
    size = whole(config, "shared_expert_intermediate_size", name)
    return _read(config, name) | read_sparse(config, name) | {"shared_expert_size": size}


def _write_qwen3_next(fields: Fields) -> Config:
    shared = {"shared_expert_intermediate_size": fields["shared_expert_size"]}
    return _write(fields) | write_sparse(fields) | shared


def _qwen3_5_moe(config: Config, name: str) -> Fields:
    size = whole(config, "shared_expert_intermediate_size", name)
    own = {"shared_expert_size": size, "normalised_top_k": True}
    return _read(config, name) | read_experts(config, name) | own


def _write_qwen3_5_moe(fields: Fields) -> Config:
    sizes = {"expert_size": "moe_intermediate_size", "shared_expert_size": "shared_expert_intermediate_size"}
    return _write(fields) | write_experts(fields) | {theirs: fields[ours] for ours, theirs in sizes.items()}


_NAMES: Names = PLAIN | QK_NORM | _GATE | _NET
_PREDICTOR: Names = {
    "layers.{}.main_norm": "model.norm",
    "layers.{}.embed_norm": "mtp.pre_fc_norm_embedding",
    "layers.{}.hidden_norm": "mtp.pre_fc_norm_hidden",
    "layers.{}.join": "mtp.fc",
    "norm": "mtp.norm",
}

DELTA_FAMILIES: dict[str, Family] = {
    "qwen3_next": row(
        "qwen3_next",
        _NAMES | _BY_HEADS | ONE_BY_ONE | SHARED_GATE,
        read=_qwen3_next,
        write=_write_qwen3_next,
        predictor=_PREDICTOR,
        read_too=(IN_MEMORY,),
    ),
    "qwen3_5_text": row("qwen3_5_text", _NAMES | _APART, read=_read, write=_write, predictor=_PREDICTOR),
    "qwen3_5_moe_text": row(
        "qwen3_5_moe_text",
        _NAMES | _APART | ONE_BY_ONE | SHARED_GATE,
        read=_qwen3_5_moe,
        write=_write_qwen3_5_moe,
        predictor=_PREDICTOR,
        read_too=(IN_MEMORY,),
    ),
}
"""Rows of families.FAMILIES."""
