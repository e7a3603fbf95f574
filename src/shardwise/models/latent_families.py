"""Families whose mixer is latent attention: DeepSeek's, and those built like them. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict

from shardwise.models.expert_families import IN_MEMORY, ONE_BY_ONE
from shardwise.models.family import PLAIN, Config, Family, Fields, Names, row, whole
from shardwise.models.kinds import GroupedRouting
from shardwise.models.rope import number, score_factor, unsupported
from shardwise.models.rope import read as read_scaling
from shardwise.models.sigmoid_families import (
    DEEPSEEK,
    PREDICTOR,
    SHARED,
    read_deepseek,
    read_dense_first,
    write_deepseek,
    write_dense_first,
)

_ATTENTION: Names = {
    f"layers.{{}}.attention.{ours}": f"model.layers.{{}}.self_attn.{theirs}"
    for ours, theirs in {
        "q_a": "q_a_proj",
        "q_a_norm": "q_a_layernorm",
        "q_b": "q_b_proj",
        "kv_a": "kv_a_proj_with_mqa",
        "kv_a_norm": "kv_a_layernorm",
        "kv_b": "kv_b_proj",
    }.items()
}
_DIMS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


def read_latent(config: Config, name: str) -> Fields:
    """The fields of latent attention."""
    dims = {key: whole(config, key, name) for key in _DIMS}
    head_dim = dims["qk_nope_head_dim"] + dims["qk_rope_head_dim"]
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    factor = score_factor(read_scaling(values, config["max_position_embeddings"], None, name))
    return dims | {
        "mixer": "latent",
        "q_lora_rank": None if config.get("q_lora_rank") is None else whole(config, "q_lora_rank", name),
        "rope_interleave": bool(config.get("rope_interleave", True)),
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": head_dim,
        "attention_scale": None if factor == 1.0 else head_dim**-0.5 * factor,
    }


def write_latent(fields: Fields) -> Config:
    """The inverse of :func:`read_latent`."""
    keys = (*_DIMS, "q_lora_rank", "rope_interleave")
    return {key: fields[key] for key in keys} | {"head_dim": fields["qk_rope_head_dim"]}


_V2 = {
    "topk_method": ("greedy", "group_limited_greedy"),
    "scoring_func": ("softmax",),
    "norm_topk_prob": (False,),
    "moe_layer_freq": (1,),
}
"""What is read of DeepSeek-V2's router, the usual value first. V2-Lite chooses among all experts."""


def _deepseek_v2(config: Config, name: str) -> Fields:
    for key, values in _V2.items():
        if config.get(key) not in (*values, None):
            raise unsupported(f"`{key}: {config[key]}` is not supported", name, f"{key}: {values[0]}")
    grouped = config.get("topk_method") == "group_limited_greedy"
    groups, kept = (whole(config, key, name) if grouped else 1 for key in ("n_group", "topk_group"))
    routing = GroupedRouting(groups, kept, number(config, "routed_scaling_factor", 1.0, name))
    own = {"softmax_groups": None if routing == GroupedRouting() else routing, "normalised_top_k": False}
    return read_dense_first(config, name) | read_latent(config, name) | own


def _write_deepseek_v2(fields: Fields) -> Config:
    routing = fields["softmax_groups"] or asdict(GroupedRouting())
    return (
        write_dense_first(fields)
        | write_latent(fields)
        | {
            "topk_method": "group_limited_greedy" if routing["groups"] > 1 else "greedy",
            "n_group": routing["groups"],
            "topk_group": routing["kept_groups"],
            "routed_scaling_factor": routing["scale"],
            "norm_topk_prob": False,
        }
    )


def _deepseek_v3(config: Config, name: str) -> Fields:
    return read_deepseek(config, name) | read_latent(config, name)


def _write_deepseek_v3(fields: Fields) -> Config:
    return write_deepseek(fields) | write_latent(fields)


LATENT_FAMILIES: dict[str, Family] = {
    "deepseek_v2": row(
        "deepseek_v2",
        PLAIN | _ATTENTION | ONE_BY_ONE | SHARED,
        read=_deepseek_v2,
        write=_write_deepseek_v2,
        read_too=(IN_MEMORY,),
    ),
    "deepseek_v3": row(
        "deepseek_v3",
        PLAIN | _ATTENTION | DEEPSEEK,
        read=_deepseek_v3,
        write=_write_deepseek_v3,
        predictor=PREDICTOR,
        read_too=(IN_MEMORY,),
    ),
}
"""Rows of families.FAMILIES."""
SAME_CLASS = {"kimi_k2": "deepseek_v3"}
"""Other names of a ``model_type``."""
