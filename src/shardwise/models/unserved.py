"""Models that are not supported, recognised by config.json or by name (unserved.json). Imports torch only to
count what no formula here does: what needs the model to be built is found by models/hf_model.py.

    counts   keys of a config of which one is above 1
    keys     keys of which one is given, and not off
    layers   words of ``layer_types``
    kinds    ``model_type``
    names    a pattern in a model's name without its owner, for where no config.json is at hand
    counted  whose parameters can be counted all the same
    alone    given where the rest of a model of these ``kinds`` is supported: nothing else of its config is told, and it
             is refused under the name of a family of ours too
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, Problem
from shardwise.spec.units import show_bytes, show_count

BYTES_OF_STATE = 16
"""A parameter: an fp32 weight, its gradient and two moments."""
SIZES = {"deepseek-(v3|r1)": 671.0, "kimi-k2": 1026.0}
"""Billions of parameters, by a pattern in a name that does not say them."""


@cache
def _rows() -> list[dict[str, str]]:
    return json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))


def refuse_config(config: dict[str, Any], name: str, *, ours: bool = False) -> None:
    """Raise ConfigError MOD001 for a model of a kind that is not supported, with all that it lacks; its text part
    counts too. ``ours``: it is named as one of a family of ours."""
    inner = [part for part in config.values() if isinstance(part, dict) and "hidden_size" in part]
    lacking = [row for row in _rows() if any(_is_such(row, part) for part in (config, *inner))]
    kind = config.get("model_type")
    alone = [row for row in lacking if "alone" in row and (ours or kind in row["kinds"].split())]
    lacking = alone or ([] if ours else lacking)
    if lacking:
        counted = parameters_of(config) if all("counted" in row for row in lacking) else None
        counted = counted or _said_of(name.lower()) or count_in_transformers(config)
        raise _refused(name, lacking, f"config of {name}", counted)


def _is_such(row: dict[str, str], part: dict[str, Any]) -> bool:
    kinds = row.get("kinds", "").split()
    layers = row.get("layers", "").split()
    types = part.get("layer_types")
    many = any(type(part.get(key)) is int and part[key] > 1 for key in row.get("counts", "").split())
    given = any(part.get(key) for key in row.get("keys", "").split())
    layered = isinstance(types, list) and any(kind in layers for kind in types)
    return many or given or layered or part.get("model_type") in kinds


def refuse_name(source: str) -> None:
    """Raise ConfigError MOD001 where the name of a model says that it is of such a kind."""
    name = source.rpartition("/")[2]
    if lacking := [row for row in _rows() if "names" in row and re.search(row["names"], name.lower())]:
        alone = [row for row in lacking if "alone" in row]
        raise _refused(name, alone or lacking, "model.path", _said_of(name.lower()))


def parameters_of(config: dict[str, Any]) -> int | None:
    """Return how many parameters a decoder has, or the text part of a model of text and images, whose attention may be
    latent and whose blocks may have experts, as DeepSeek's; None where the config does not tell."""
    if "hidden_size" not in config and isinstance(config.get("text_config"), dict):
        config = {**config, **config["text_config"]}
    try:
        hidden, blocks, heads = (config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        if latent := config.get("kv_lora_rank"):
            bare, turned, values = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
            asked, rank = heads * (bare + turned), config.get("q_lora_rank")
            attention = rank * (hidden + asked) if rank else hidden * asked
            attention += hidden * (latent + turned) + latent * heads * (bare + values) + heads * values * hidden
        else:
            width = config.get("head_dim") or hidden // heads
            attention = 2 * hidden * width * (heads + (config.get("num_key_value_heads") or heads))
        names = ("n_routed_experts", "num_experts", "num_local_experts")
        experts = next((config[name] for name in names if config.get(name)), 0)
        dense = config.get("first_k_dense_replace", 0) if experts else blocks
        wide = config.get("moe_intermediate_size") or config["intermediate_size"]
        each = 3 * hidden * wide * (experts + (config.get("n_shared_experts") or 0)) + hidden * experts
        ends = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
        whole = dense * 3 * hidden * config["intermediate_size"] + (blocks - dense) * each
        return int(blocks * attention + whole + ends)
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def _said_of(name: str) -> int | None:
    """The parameters that a name says, or that are known of it."""
    known = next((count for pattern, count in SIZES.items() if re.search(pattern, name)), None)
    said = re.search(r"(?<![\d.a])(\d+(?:\.\d+)?)b\b", name)
    billions = known or (float(said[1]) if said else None)
    return int(billions * 1e9) if billions else None


def count_in_transformers(config: dict[str, Any]) -> int | None:
    """Return how many parameters transformers' model of ``config`` has, which is built without memory; None where it
    cannot build it."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    try:
        made = CONFIG_MAPPING[config["model_type"]].from_dict(config)
        with torch.device("meta"):
            return sum(value.numel() for value in AutoModelForCausalLM.from_config(made).parameters())
    except Exception:  # code of some hundred models, of which any may fail in its own way
        return None


def _refused(name: str, lacking: list[dict[str, str]], where: str, parameters: int | None) -> ConfigError:
    fix = "a model of another family (docs/models.md), or the module in your own training loop (docs/own-loop.md)"
    what = f"{name} {'; and it '.join(row['what'] for row in lacking)}"
    if parameters:
        size = f"{show_bytes(BYTES_OF_STATE * parameters)} over all GPUs"
        whose = next((row["counted"] for row in lacking if row.get("counted", "its") != "its"), "its")
        what += f" (weights, gradients and AdamW's moments of {whose} {show_count(parameters)} parameters take {size})"
    return ConfigError(Problem("MOD001", what, where, fix))
