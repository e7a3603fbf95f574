"""Families whose routers choose by sigmoids: rows of ``families.FAMILIES``. Imports no torch."""

from __future__ import annotations

from shardwise.models.expert_families import IN_MEMORY, MIXTRAL, ONE_BY_ONE, read_experts, write_experts
from shardwise.models.family import (
    BEFORE,
    BLOCK,
    EDGES,
    QK_NORM,
    Config,
    Family,
    Fields,
    Names,
    layer_types,
    layers,
    refuse,
    rotated_share,
    whole,
    window,
)
from shardwise.models.kinds import SigmoidRouting
from shardwise.models.rope import number, unsupported

CORRECTION = "layers.{}.mlp.router.correction"
SHARED: Names = {
    f"layers.{{}}.mlp.shared.{x}": f"model.layers.{{}}.mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")
}
DEEPSEEK: Names = ONE_BY_ONE | SHARED | {CORRECTION: "model.layers.{}.mlp.gate.e_score_correction_bias"}
"""Experts, router and shared experts as DeepSeek-V3 names them."""
PREDICTOR: Names = {
    "layers.{}.main_norm": "model.norm",
    "layers.{}.embed_norm": "model.layers.{}.enorm",
    "layers.{}.hidden_norm": "model.layers.{}.hnorm",
    "layers.{}.join": "model.layers.{}.eh_proj",
    "norm": "model.layers.{}.shared_head.norm",
}
"""What a layer that predicts a further token has besides a block's, as DeepSeek-V3 names it."""
COPIES = {
    "model.layers.{}.embed_tokens.weight": "embed.weight",
    "model.layers.{}.shared_head.head.weight": "head.weight",
}
"""Tensors of such a layer that are the model's own, written once more."""
_MINIMAX = MIXTRAL | {CORRECTION: "model.layers.{}.block_sparse_moe.e_score_correction_bias"}
_MINIMAX_IN_MEMORY = IN_MEMORY | {CORRECTION: "model.layers.{}.mlp.e_score_correction_bias"}


def read_dense_first(config: Config, name: str) -> Fields:
    """Experts, and beside them an MLP for all tokens, in all layers but the first."""
    own = read_experts(config, name, "n_routed_experts")
    dense = min(whole(config, "first_k_dense_replace", name), config["num_hidden_layers"])
    shared = whole(config, "n_shared_experts", name) * own["expert_size"]
    return own | {"shared_expert_size": shared, "dense_layers": tuple(range(dense))}


def write_dense_first(fields: Fields) -> Config:
    """The inverse of :func:`read_dense_first`."""
    return write_experts(fields, "n_routed_experts") | {
        "moe_intermediate_size": fields["expert_size"],
        "n_shared_experts": fields["shared_expert_size"] // fields["expert_size"],
        "first_k_dense_replace": len(fields["dense_layers"]),
    }


def read_deepseek(config: Config, name: str) -> Fields:
    """The experts and routers of DeepSeek-V3's kind, in all layers but the first. The shared experts are one MLP."""
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if config.get(key, only) != only:
            raise unsupported(f"`{key}: {config[key]}` is not supported", name, f"{key}: {only}")
    groups, kept = (whole(config, key, name) for key in ("n_group", "topk_group"))
    routing = SigmoidRouting(groups, kept, number(config, "routed_scaling_factor", 1.0, name))
    return read_dense_first(config, name) | {"sigmoid": routing}


def write_deepseek(fields: Fields) -> Config:
    """The inverse of :func:`read_deepseek`."""
    routing = fields["sigmoid"]
    return write_dense_first(fields) | {
        "norm_topk_prob": fields["normalised_top_k"],
        "routed_scaling_factor": routing["scale"],
        "n_group": routing["groups"],
        "topk_group": routing["kept_groups"],
        "num_nextn_predict_layers": 0,
    }


def _glm4_moe(config: Config, name: str) -> Fields:
    norms = {"qk_norm": "head" if config.get("use_qk_norm") else None}
    return read_deepseek(config, name) | rotated_share(config, name) | norms


def _write_glm4_moe(fields: Fields) -> Config:
    own = {"use_qk_norm": fields["qk_norm"] is not None, "partial_rotary_factor": fields["partial_rotary_factor"]}
    return write_deepseek(fields) | own


def _dots1(config: Config, name: str) -> Fields:
    """The published files call DeepSeek-V3's scores by the name of its choice among them."""
    scores = config.get("scoring_func")
    config = {**config, "scoring_func": "sigmoid" if scores in (None, "noaux_tc") else scores}
    first = whole(config, "max_window_layers", name)
    return read_deepseek(config, name) | layers(config, name, lambda layer: layer >= first)


def _write_dots1(fields: Fields) -> Config:
    return write_deepseek(fields) | window(fields) | {"layer_types": layer_types(fields)}


def _minimax_m2(config: Config, name: str) -> Fields:
    refuse(config, "router_jitter_noise", name)
    if config.get("scoring_func", "sigmoid") != "sigmoid":
        raise unsupported(f"`scoring_func: {config['scoring_func']}` is not supported", name, "scoring_func: sigmoid")
    if config.get("rotary_dim") is not None and config.get("partial_rotary_factor") is None:
        config = {**config, "partial_rotary_factor": config["rotary_dim"] / config["head_dim"]}
    own = read_experts(config, name, "num_local_experts", "intermediate_size")
    return own | rotated_share(config, name) | {"sigmoid": SigmoidRouting(), "normalised_top_k": True}


def _write_minimax_m2(fields: Fields) -> Config:
    share = fields["partial_rotary_factor"]
    own = {"partial_rotary_factor": share, "rotary_dim": int(fields["head_dim"] * share)}
    return write_experts(fields, "num_local_experts") | own


SIGMOID_FAMILIES: dict[str, Family] = {
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        EDGES | BEFORE | BLOCK | QK_NORM | DEEPSEEK,
        _glm4_moe,
        _write_glm4_moe,
        {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "partial_rotary_factor": 0.5,
            "router_aux_loss_coef": 0.0,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        ("attention_bias",),
        predictors=r"layers\.LAYERS\.",
        predictor=PREDICTOR,
        copies=COPIES,
        fields={"attention_output_bias": False},
        read_too=(IN_MEMORY,),
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        EDGES | BEFORE | BLOCK | QK_NORM | DEEPSEEK,
        _dots1,
        _write_dots1,
        {
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "router_aux_loss_coef": 0.0,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
        ("attention_bias",),
        fields={"qk_norm": "head"},
        read_too=(IN_MEMORY,),
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        EDGES | BEFORE | BLOCK | QK_NORM | _MINIMAX,
        _minimax_m2,
        _write_minimax_m2,
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "rope_theta": 5e6,
            "num_experts_per_tok": 8,
            "num_local_experts": 256,
            "router_aux_loss_coef": 0.001,
        },
        brings_code=True,
        fields={"qk_norm": "projection"},
        read_too=(_MINIMAX_IN_MEMORY,),
    ),
}
