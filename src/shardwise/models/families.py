"""Model families: how to read the config.json of each, and the names of its weights. Imports no torch.

There is one decoder. A family is a row of :data:`FAMILIES`: it says in fields of ModelSpec what its models are made of,
so that nothing else ever asks for a family by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.models.rope import number, unsupported

Config = dict[str, Any]
Fields = dict[str, Any]
"""Fields of ModelSpec by name."""

SLIDING, FULL = "sliding_attention", "full_attention"

BLOCK = {
    **{f"layers.{{}}.attention.{x}": f"model.layers.{{}}.self_attn.{x}_proj" for x in "qkvo"},
    **{f"layers.{{}}.mlp.{x}": f"model.layers.{{}}.mlp.{x}_proj" for x in ("gate", "up", "down")},
}
EDGES = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
BEFORE = {
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "layers.{}.mlp_norm": "model.layers.{}.post_attention_layernorm",
}
AFTER = {
    "layers.{}.attention_after_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.mlp_after_norm": "model.layers.{}.post_feedforward_layernorm",
}
BOTH = {
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "layers.{}.mlp_norm": "model.layers.{}.pre_feedforward_layernorm",
    **AFTER,
}
QK_NORM = {f"layers.{{}}.attention.{x}_norm": f"model.layers.{{}}.self_attn.{x}_norm" for x in "qk"}
FUSED = {
    **{f"layers.{{}}.attention.{x}": "model.layers.{}.self_attn.qkv_proj" for x in "qkv"},
    **{f"layers.{{}}.mlp.{x}": "model.layers.{}.mlp.gate_up_proj" for x in ("gate", "up")},
}


@dataclass(frozen=True)
class Family:
    """``names``: canonical module -> its name in the files; {} is the layer. Several modules with one name are stacked
    there along dim 0, in this order. ``defaults``: keys that a config.json may leave out, as transformers fills them.
    ``read`` gives the fields that this family's keys mean, ``write`` is its inverse. ``biases`` are the keys that say
    where biases are. ``within`` is the model_type of a model of text and images whose text part this is, and ``unused``
    matches the tensors of its other parts. ``brings_code``: the files name Python code, which transformers has made its
    own since, and which is not needed here either. ``fields`` are those that all of its models share."""

    architecture: str
    names: Mapping[str, str]
    read: Callable[[Config, str], Fields] = lambda config, name: {}
    write: Callable[[Fields], Config] = lambda fields: {}
    defaults: Config = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    within: str = ""
    unused: str = ""
    brings_code: bool = False
    fields: Fields = field(default_factory=dict)


def _optional(config: Config, key: str, name: str) -> float | None:
    return None if config.get(key) is None else number(config, key, None, name)


def _layers(config: Config, name: str, sliding: Callable[[int], bool]) -> Fields:
    """Window and layer types: those that the config lists, else by the family's rule. One type needs no list."""
    window, count = _optional(config, "sliding_window", name), config["num_hidden_layers"]
    types = config.get("layer_types") or [SLIDING if sliding(layer) else FULL for layer in range(count)]
    if wrong := [kind for kind in types if kind not in (SLIDING, FULL)]:
        raise unsupported(f"layers of type {wrong[0]!r} are not supported", name, f"layer_types: {FULL} or {SLIDING}")
    if window is None or SLIDING not in types:
        return {}
    return {"sliding_window": int(window), "layer_types": tuple(types) if FULL in types else ()}


def _layer_types(fields: Fields) -> list[str]:
    one = FULL if fields["sliding_window"] is None else SLIDING
    return list(fields["layer_types"]) or [one] * fields["num_hidden_layers"]


def _mistral(config: Config, name: str) -> Fields:
    return _layers({**config, "layer_types": None}, name, lambda layer: True)


def _window(fields: Fields) -> Config:
    return {"sliding_window": fields["sliding_window"]}


def _switched(config: Config, name: str, sliding: Callable[[int], bool]) -> Fields:
    """As :func:`_layers`, for a family with a key that turns its window on."""
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    return _layers({**config, "sliding_window": window}, name, sliding)


def _write_switched(fields: Fields) -> Config:
    switch = fields["sliding_window"] is not None
    return _window(fields) | {"use_sliding_window": switch, "layer_types": _layer_types(fields)}


def _qwen(config: Config, name: str) -> Fields:
    first = int(number(config, "max_window_layers", 28, name))
    return _switched(config, name, lambda layer: layer >= first)


def _write_qwen(fields: Fields) -> Config:
    types = _layer_types(fields)
    first = types.index(SLIDING) if SLIDING in types else len(types)
    return _write_switched(fields) | {"max_window_layers": first}


def _gemma2(config: Config, name: str) -> Fields:
    _refuse(config, "use_bidirectional_attention", name)
    return _layers(config, name, lambda layer: layer % 2 == 0) | {
        "embedding_multiplier": config["hidden_size"] ** 0.5,
        "attention_scale": number(config, "query_pre_attn_scalar", None, name) ** -0.5,
        "attention_soft_cap": _optional(config, "attn_logit_softcapping", name),
        "final_soft_cap": _optional(config, "final_logit_softcapping", name),
    }


def _write_gemma2(fields: Fields) -> Config:
    return {
        "sliding_window": fields["sliding_window"],
        "layer_types": _layer_types(fields),
        "query_pre_attn_scalar": round(fields["attention_scale"] ** -2),
        "attn_logit_softcapping": fields["attention_soft_cap"],
        "final_logit_softcapping": fields["final_soft_cap"],
    }


def _gemma3(config: Config, name: str) -> Fields:
    # transformers reads this key and then does nothing with it.
    _refuse(config, "attn_logit_softcapping", name)
    every, count = int(number(config, "sliding_window_pattern", 6, name)), config["num_hidden_layers"]
    types = config.get("layer_types") or [FULL if (i + 1) % every == 0 else SLIDING for i in range(count)]
    local = (config.get("rope_parameters") or {}).get(SLIDING) or {}
    if local.get("rope_type", "default") != "default":
        what = f"rope scaling {local['rope_type']!r} in sliding layers is not supported"
        raise unsupported(what, name, "rope_type: default")
    where, key = (local, "rope_theta") if "rope_theta" in local else (config, "rope_local_base_freq")
    theta = number(where, key, 10_000.0, name)
    fields = _gemma2({**config, "layer_types": types}, name)
    return fields | {"local_rope_theta": theta if SLIDING in types else None}


def _phi3(config: Config, name: str) -> Fields:
    values = config.get("rope_parameters") or {}
    share = number(values if "partial_rotary_factor" in values else config, "partial_rotary_factor", 1.0, name)
    return _mistral(config, name) | {"partial_rotary_factor": share}


def _write_phi3(fields: Fields) -> Config:
    scaling, share = fields["rope_scaling"], fields["partial_rotary_factor"]
    longest = fields["max_position_embeddings"]
    original = longest if scaling is None else scaling["original_max_position_embeddings"]
    return _window(fields) | {"partial_rotary_factor": share, "original_max_position_embeddings": original}


def _smollm3(config: Config, name: str) -> Fields:
    every, count = int(number(config, "no_rope_layer_interval", 4, name)), config["num_hidden_layers"]
    roped = config.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
    nope = tuple(layer for layer, rotated in enumerate(roped[:count]) if not rotated)
    return _switched(config, name, lambda layer: layer in nope) | {"nope_layers": nope}


def _write_smollm3(fields: Fields) -> Config:
    roped = [int(layer not in fields["nope_layers"]) for layer in range(fields["num_hidden_layers"])]
    return _write_switched(fields) | {"no_rope_layers": roped}


_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
"""Granite's keys that have the same name in ModelSpec."""


def _granite(config: Config, name: str) -> Fields:
    scale = number(config, "attention_multiplier", 1.0, name)
    return {key: number(config, key, 1.0, name) for key in _MULTIPLIERS} | {"attention_scale": scale}


def _write_granite(fields: Fields) -> Config:
    return {key: fields[key] for key in _MULTIPLIERS} | {"attention_multiplier": fields["attention_scale"]}


def _refuse(config: Config, key: str, name: str) -> None:
    if config.get(key):
        raise unsupported(f"`{key}: {config[key]}` is not supported", name, f"{key}: null")


_GEMMA: Config = {
    "hidden_act": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_SANDWICH: Fields = {"norm_placement": "both", "norm_plus_one": True}
"""Gemma's norms, on both sides of attention and MLP."""

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", EDGES | BEFORE | BLOCK, biases=("attention_bias", "mlp_bias")),
    "mistral": Family(
        "MistralForCausalLM",
        EDGES | BEFORE | BLOCK,
        _mistral,
        _window,
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        EDGES | BEFORE | BLOCK,
        _qwen,
        _write_qwen,
        {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
        fields={"attention_bias": True, "attention_output_bias": False},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        EDGES | BEFORE | BLOCK | QK_NORM,
        _qwen,
        _write_qwen,
        {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
        ("attention_bias",),
        fields={"qk_norm": "head"},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        EDGES | BOTH | BLOCK,
        _gemma2,
        _write_gemma2,
        _GEMMA
        | {
            "vocab_size": 256_000,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        ("attention_bias",),
        fields=_SANDWICH,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        EDGES | BOTH | BLOCK | QK_NORM,
        _gemma3,
        _write_gemma2,
        _GEMMA | {"vocab_size": 262_208, "max_position_embeddings": 131_072, "rope_theta": 1e6},
        ("attention_bias",),
        "gemma3",
        r"vision_tower\.|multi_modal_projector\.",
        fields=_SANDWICH | {"qk_norm": "head"},
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        EDGES | BEFORE | BLOCK | FUSED,
        _phi3,
        _write_phi3,
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "pad_token_id": 32000,
        },
        brings_code=True,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        EDGES | BEFORE | BLOCK,
        _smollm3,
        _write_smollm3,
        {
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "pad_token_id": 128_004,
        },
        ("attention_bias", "mlp_bias"),
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        EDGES | AFTER | BLOCK | QK_NORM,
        defaults={"rms_norm_eps": 1e-5, "pad_token_id": 1},
        biases=("attention_bias",),
        fields={"norm_placement": "after", "qk_norm": "projection"},
    ),
    "granite": Family(
        "GraniteForCausalLM", EDGES | BEFORE | BLOCK, _granite, _write_granite, biases=("attention_bias", "mlp_bias")
    ),
}
"""By ``model_type``."""

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""``hidden_act`` -> the field ``activation``."""
