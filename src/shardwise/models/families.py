"""Model families: how to read the config.json of each, and the names of its weights. Imports no torch.

There is one decoder. A family is a row of :data:`FAMILIES`: it says in fields of ModelSpec what its models are made of,
so that nothing else ever asks for a family by name.
"""

from __future__ import annotations

from typing import Any

from shardwise.errors import PolicyError, Problem
from shardwise.models import family
from shardwise.models.delta_families import DELTA_FAMILIES
from shardwise.models.expert_families import EXPERT_FAMILIES
from shardwise.models.family import AFTER, BLOCK, BOTH, EDGES, FUSED, PLAIN, QK_NORM, Config, Family, Fields
from shardwise.models.family import FULL as FULL
from shardwise.models.family import SLIDING as SLIDING
from shardwise.models.latent_families import LATENT_FAMILIES, SAME_CLASS
from shardwise.models.rope import number, unsupported
from shardwise.models.sigmoid_families import SIGMOID_FAMILIES
from shardwise.spec.outside import with_others


def _qwen(config: Config, name: str) -> Fields:
    first = int(number(config, "max_window_layers", 28, name))
    return family.switched(config, name, lambda layer: layer >= first)


def _write_qwen(fields: Fields) -> Config:
    types = family.layer_types(fields)
    first = types.index(SLIDING) if SLIDING in types else len(types)
    return family.write_switched(fields) | {"max_window_layers": first}


def _gemma2(config: Config, name: str) -> Fields:
    family.refuse(config, "use_bidirectional_attention", name)
    return family.layers(config, name, lambda layer: layer % 2 == 0) | {
        "embedding_multiplier": config["hidden_size"] ** 0.5,
        "attention_scale": number(config, "query_pre_attn_scalar", None, name) ** -0.5,
        "attention_soft_cap": family.optional(config, "attn_logit_softcapping", name),
        "final_soft_cap": family.optional(config, "final_logit_softcapping", name),
    }


def _write_gemma2(fields: Fields) -> Config:
    return {
        "sliding_window": fields["sliding_window"],
        "layer_types": family.layer_types(fields),
        "query_pre_attn_scalar": round(fields["attention_scale"] ** -2),
        "attn_logit_softcapping": fields["attention_soft_cap"],
        "final_logit_softcapping": fields["final_soft_cap"],
    }


def _gemma3(config: Config, name: str) -> Fields:
    # transformers reads this key and then does nothing with it.
    family.refuse(config, "attn_logit_softcapping", name)
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
    return family.all_sliding(config, name) | family.rotated_share(config, name)


def _write_phi3(fields: Fields) -> Config:
    scaling, share = fields["rope_scaling"], fields["partial_rotary_factor"]
    longest = fields["max_position_embeddings"]
    original = longest if scaling is None else scaling["original_max_position_embeddings"]
    return family.window(fields) | {"partial_rotary_factor": share, "original_max_position_embeddings": original}


def _smollm3(config: Config, name: str) -> Fields:
    every, count = int(number(config, "no_rope_layer_interval", 4, name)), config["num_hidden_layers"]
    roped = config.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
    nope = tuple(layer for layer, rotated in enumerate(roped[:count]) if not rotated)
    return family.switched(config, name, lambda layer: layer in nope) | {"nope_layers": nope}


def _write_smollm3(fields: Fields) -> Config:
    roped = [int(layer not in fields["nope_layers"]) for layer in range(fields["num_hidden_layers"])]
    return family.write_switched(fields) | {"no_rope_layers": roped}


_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
"""Granite's keys that have the same name in ModelSpec."""


def _granite(config: Config, name: str) -> Fields:
    scale = number(config, "attention_multiplier", 1.0, name)
    return {key: number(config, key, 1.0, name) for key in _MULTIPLIERS} | {"attention_scale": scale}


def _write_granite(fields: Fields) -> Config:
    return {key: fields[key] for key in _MULTIPLIERS} | {"attention_multiplier": fields["attention_scale"]}


_OURS: dict[str, Family] = {
    "llama": family.row("llama", PLAIN),
    "mistral": family.row("mistral", PLAIN, read=family.all_sliding, write=family.window),
    "qwen2": family.row("qwen2", PLAIN, read=_qwen, write=_write_qwen),
    "qwen3": family.row("qwen3", PLAIN | QK_NORM, read=_qwen, write=_write_qwen),
    "gemma2": family.row("gemma2", EDGES | BOTH | BLOCK, read=_gemma2, write=_write_gemma2),
    "gemma3_text": family.row("gemma3_text", EDGES | BOTH | BLOCK | QK_NORM, read=_gemma3, write=_write_gemma2),
    "phi3": family.row("phi3", PLAIN | FUSED, read=_phi3, write=_write_phi3),
    "smollm3": family.row("smollm3", PLAIN, read=_smollm3, write=_write_smollm3),
    "olmo2": family.row("olmo2", EDGES | AFTER | BLOCK | QK_NORM),
    "granite": family.row("granite", PLAIN, read=_granite, write=_write_granite),
    **EXPERT_FAMILIES,
    **LATENT_FAMILIES,
    **DELTA_FAMILIES,
    **SIGMOID_FAMILIES,
}

FAMILIES = with_others("shardwise.families", Family, _OURS)
"""By ``model_type``, those of installed packages too."""

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""``hidden_act`` -> the field ``activation``."""


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The config itself; for a model of text and images, the config of its text part, with the outer keys that
    apply."""
    if config.get("model_type") not in {family.within for family in FAMILIES.values()} - {""}:
        return config
    outer = {key: config[key] for key in ("auto_map", "bos_token_id", "eos_token_id") if config.get(key) is not None}
    return {**config.get("text_config", {}), **outer}


def family_of(config: dict[str, Any], name: str) -> str | None:
    """The key in FAMILIES of the model that a config describes, or None. Raises PolicyError (SEC008)."""
    config = text_part(config)
    config = {**config, "model_type": SAME_CLASS.get(str(config.get("model_type")), config.get("model_type"))}
    by_architecture = {family.architecture: model_type for model_type, family in FAMILIES.items()}
    model_type = config.get("model_type")
    if config.get("auto_map") and not (model_type in FAMILIES and FAMILIES[model_type].brings_code):
        what = f"{name} needs to run its own Python code ({', '.join(config['auto_map'])}); it is never executed"
        fix = f"supported architectures: {', '.join(by_architecture)}"
        raise PolicyError(Problem("SEC008", what, f"config of {name}", fix))
    if model_type in FAMILIES:
        return str(model_type)
    return by_architecture.get(next(iter(config.get("architectures") or []), ""))


def activation(config: dict[str, Any], name: str) -> Any:
    """Gemma's files have both ``hidden_act`` and ``hidden_activation``; the latter counts."""
    act = config.get("hidden_activation") or config.get("hidden_act", "silu")
    if act not in ACTIVATIONS:
        raise unsupported(f"hidden_act {act!r} is not supported", name, f"hidden_act: {' or '.join(ACTIVATIONS)}")
    return ACTIVATIONS[act]
