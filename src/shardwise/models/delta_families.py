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
    BEFORE,
    BLOCK,
    EDGES,
    FULL,
    QK_NORM,
    ByHead,
    Config,
    Family,
    Fields,
    Names,
    rotated_share,
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


_NAMES: Names = EDGES | BEFORE | BLOCK | QK_NORM | _GATE | _NET
_DEFAULTS: Config = {
    "max_position_embeddings": 32768,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "head_dim": 256,
    "router_aux_loss_coef": 0.001,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_FIELDS: Fields = {"qk_norm": "head", "norm_plus_one": True, "attention_gate": True}
_IMAGES, _PREDICTORS = r"visual\.", r"mtp\."
"""Tensors of images; and of layers that predict further tokens, which transformers does not read either."""
_PREDICTOR: Names = {
    "layers.{}.main_norm": "model.norm",
    "layers.{}.embed_norm": "mtp.pre_fc_norm_embedding",
    "layers.{}.hidden_norm": "mtp.pre_fc_norm_hidden",
    "layers.{}.join": "mtp.fc",
    "norm": "mtp.norm",
}

DELTA_FAMILIES: dict[str, Family] = {
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        _NAMES | _BY_HEADS | ONE_BY_ONE | SHARED_GATE,
        _qwen3_next,
        _write_qwen3_next,
        _DEFAULTS
        | {
            "num_key_value_heads": 2,
            "decoder_sparse_step": 1,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
        },
        ("attention_bias",),
        unused=_IMAGES,
        predictors=_PREDICTORS,
        predictor=_PREDICTOR,
        predictor_block="mtp.layers.0",
        fields=_FIELDS | {"shared_expert_gate": True},
        read_too=(IN_MEMORY,),
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        _NAMES | _APART,
        _read,
        _write,
        _DEFAULTS | {"num_key_value_heads": 4},
        ("attention_bias",),
        "qwen3_5",
        _IMAGES,
        predictors=_PREDICTORS,
        predictor=_PREDICTOR,
        predictor_block="mtp.layers.0",
        predictor_count="mtp_num_hidden_layers",
        fields=_FIELDS,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        _NAMES | _APART | ONE_BY_ONE | SHARED_GATE,
        _qwen3_5_moe,
        _write_qwen3_5_moe,
        _DEFAULTS | {"num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 512},
        ("attention_bias",),
        "qwen3_5_moe",
        _IMAGES,
        predictors=_PREDICTORS,
        predictor=_PREDICTOR,
        predictor_block="mtp.layers.0",
        predictor_count="mtp_num_hidden_layers",
        fields=_FIELDS | {"shared_expert_gate": True},
        read_too=(IN_MEMORY,),
    ),
}
"""Rows of families.FAMILIES."""
