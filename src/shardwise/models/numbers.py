"""Impossible numbers in a ``config.json``. Imports no torch."""

from __future__ import annotations

import math
from typing import Any

from shardwise.errors import DataError, Problem

ABOVE_ZERO = {
    "rope_theta": 10000.0,
    "rotary_emb_base": 10000,
    "rope_local_base_freq": 10000.0,
    "max_position_embeddings": 2048,
    "original_max_position_embeddings": 2048,
    "factor": 8.0,
    "short_factor": [1.0],
    "long_factor": [1.0],
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "partial_rotary_factor": 1.0,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "logits_scaling": 1.0,
    "decoder_sparse_step": 1,
}
"""Numbers that are divided by, or raised to a negative power, with a usual value of each for the message."""
NOT_NEGATIVE = {
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "router_aux_loss_coef": 0.001,
}
"""Numbers that are added to a variance before its square root, or are a standard deviation, or the share of a loss."""
AT_MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 1000),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "mtp_num_layers", "num_nextn_predict_layers"), 1000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "head_dim"), 2**14),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), 2**14),
    "num_experts_per_tok": 2**14,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 2**20),
    **dict.fromkeys(("vocab_size", "intermediate_size", "n_inner", "ffn_dim"), 2**28),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 2**28),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "sliding_window"), 2**36),
}
"""Far beyond every model: a plan is made layer by layer, and a model of transformers is built module by module."""
DEEPEST = 32
"""How deeply mappings may be nested in a config; those of real models have three levels."""


def check_numbers(config: dict[str, Any], name: str) -> None:
    """Raises DataError (MOD005) naming every number of a ``config.json`` that is NaN, infinite, beyond :data:`AT_MOST`
    or 64 bits, or zero or negative where that gives no finite result; MOD004 if it is nested beyond reason."""
    problems, where, left = [], f"config of {name}", [(config, "", 1)]
    while left:
        values, path, depth = left.pop()
        if depth > DEEPEST:
            what, fix = f"nested more than {DEEPEST} levels deep", "take the model's own config.json"
            raise DataError(Problem("MOD004", what, where, fix))
        left += [(value, f"{path}{key}.", depth + 1) for key, value in values.items() if isinstance(value, dict)]
        for key, value in values.items():
            numbers = value if isinstance(value, list) and key in ABOVE_ZERO else [value]
            if wrong := next(filter(None, (_fault(key, number) for number in numbers)), ""):
                usual = (ABOVE_ZERO | NOT_NEGATIVE).get(key)
                fix = f"the value of the model's own config.json{f', such as {usual}' if usual else ''}"
                problems.append(Problem("MOD005", f"`{path}{key}` is {wrong}", where, fix))
    if problems:
        raise DataError(*problems)


def _fault(key: str, value: Any) -> str:
    """Return what is wrong with a number, in words; empty if nothing is, or if ``value`` is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f"a whole number of {value.bit_length():,} bits; the limit is 64"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    if value > AT_MOST.get(key, value):
        return f"{value:,}; the limit is {AT_MOST[key]:,}"
    if key in ABOVE_ZERO and value <= 0:
        return f"{value}; it must be above 0"
    return f"{value}; it must not be negative" if key in NOT_NEGATIVE and value < 0 else ""
