"""Families whose routers choose by sigmoids: rows of ``families.FAMILIES``. Imports no torch."""

from __future__ import annotations

from shardwise.models import family
from shardwise.models.expert_families import IN_MEMORY, MIXTRAL, ONE_BY_ONE, read_experts, write_experts
from shardwise.models.family import PLAIN, QK_NORM, Config, Family, Fields, Names
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
_MINIMAX = MIXTRAL | {CORRECTION: "model.layers.{}.block_sparse_moe.e_score_correction_bias"}
_MINIMAX_IN_MEMORY = IN_MEMORY | {CORRECTION: "model.layers.{}.mlp.e_score_correction_bias"}


def read_dense_first(config: Config, name: str) -> Fields:
    """Experts, and beside them an MLP for all tokens, in all layers but the first."""
    own = read_experts(config, name, "n_routed_experts")
    dense = min(family.whole(config, "first_k_dense_replace", name), config["num_hidden_layers"])
    shared = family.whole(config, "n_shared_experts", name) * own["expert_size"]
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
    groups, kept = (family.whole(config, key, name) for key in ("n_group", "topk_group"))
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
    return read_deepseek(config, name) | family.rotated_share(config, name) | norms


def _write_glm4_moe(fields: Fields) -> Config:
    own = {"use_qk_norm": fields["qk_norm"] is not None, "partial_rotary_factor": fields["partial_rotary_factor"]}
    return write_deepseek(fields) | own


def _dots1(config: Config, name: str) -> Fields:
    """The published files call DeepSeek-V3's scores by the name of its choice among them."""
    scores = config.get("scoring_func")
    config = {**config, "scoring_func": "sigmoid" if scores in (None, "noaux_tc") else scores}
    first = family.whole(config, "max_window_layers", name)
    return read_deepseek(config, name) | family.layers(config, name, lambda layer: layer >= first)


def _write_dots1(fields: Fields) -> Config:
    return write_deepseek(fields) | family.window(fields) | {"layer_types": family.layer_types(fields)}


def _minimax_m2(config: Config, name: str) -> Fields:
    family.refuse(config, "router_jitter_noise", name)
    if config.get("scoring_func", "sigmoid") != "sigmoid":
        raise unsupported(f"`scoring_func: {config['scoring_func']}` is not supported", name, "scoring_func: sigmoid")
    if config.get("rotary_dim") is not None and config.get("partial_rotary_factor") is None:
        config = {**config, "partial_rotary_factor": config["rotary_dim"] / config["head_dim"]}
    own = read_experts(config, name, "num_local_experts", "intermediate_size")
    return own | family.rotated_share(config, name) | {"sigmoid": SigmoidRouting(), "normalised_top_k": True}


def _write_minimax_m2(fields: Fields) -> Config:
    share = fields["partial_rotary_factor"]
    own = {"partial_rotary_factor": share, "rotary_dim": int(fields["head_dim"] * share)}
    return write_experts(fields, "num_local_experts") | own


SIGMOID_FAMILIES: dict[str, Family] = {
    "glm4_moe": family.row(
        "glm4_moe",
        PLAIN | QK_NORM | DEEPSEEK,
        read=_glm4_moe,
        write=_write_glm4_moe,
        predictor=PREDICTOR,
        read_too=(IN_MEMORY,),
    ),
    "dots1": family.row("dots1", PLAIN | QK_NORM | DEEPSEEK, read=_dots1, write=_write_dots1, read_too=(IN_MEMORY,)),
    "minimax_m2": family.row(
        "minimax_m2",
        PLAIN | QK_NORM | _MINIMAX,
        read=_minimax_m2,
        write=_write_minimax_m2,
        read_too=(_MINIMAX_IN_MEMORY,),
    ),
}
