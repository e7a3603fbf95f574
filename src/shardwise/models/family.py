"""A family of models (:class:`Family`), and what the rows of several share: names of weights, and keys of config.json
that mean the same. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, Problem
from shardwise.models.rope import number, unsupported
from shardwise.spec.complaints import show_value

Config = dict[str, Any]
Fields = dict[str, Any]
"""Fields of ModelSpec by name."""
_FACTS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
"""By ``model_type``: what of :class:`Family` is no code."""

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Stack:
    """A tensor [E,..] of the files with a matrix (or bias) for each expert, in which a parameter has some of the rows:
    those of number ``index`` of ``count`` parameters, one after another or, ``interleaved``, in turn. ``transposed``:
    each matrix is [in, out]. ``packed``: MXFP4, two tensors whose names end in _blocks and _scales."""

    name: str
    index: int = 0
    count: int = 1
    interleaved: bool = False
    transposed: bool = False
    packed: bool = False


@dataclass(frozen=True)
class ByHead:
    """A layer of the files in which several modules have rows in turn: those of the first head of each, then those of
    the second. ``heads``: the field of ModelSpec that says how many there are."""

    name: str
    heads: str


Names = dict[str, str | Stack | ByHead]
"""Canonical module -> its name in the files, or canonical parameter -> the name of a tensor. The first {} is the layer;
with a second one, there is a tensor for each expert."""

BLOCK: Names = {
    **{f"layers.{{}}.attention.{x}": f"model.layers.{{}}.self_attn.{x}_proj" for x in "qkvo"},
    **{f"layers.{{}}.mlp.{x}": f"model.layers.{{}}.mlp.{x}_proj" for x in ("gate", "up", "down")},
}
EDGES: Names = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
BEFORE: Names = {
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "layers.{}.mlp_norm": "model.layers.{}.post_attention_layernorm",
}
PLAIN = EDGES | BEFORE | BLOCK
"""The names of most."""
AFTER: Names = {
    "layers.{}.attention_after_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.mlp_after_norm": "model.layers.{}.post_feedforward_layernorm",
}
BOTH: Names = {
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "layers.{}.mlp_norm": "model.layers.{}.pre_feedforward_layernorm",
    **AFTER,
}
QK_NORM: Names = {f"layers.{{}}.attention.{x}_norm": f"model.layers.{{}}.self_attn.{x}_norm" for x in "qk"}
FUSED: Names = {
    **{f"layers.{{}}.attention.{x}": "model.layers.{}.self_attn.qkv_proj" for x in "qkv"},
    **{f"layers.{{}}.mlp.{x}": "model.layers.{}.mlp.gate_up_proj" for x in ("gate", "up")},
}


@dataclass(frozen=True)
class Family:
    """A family of models. ``names``: of the weights in the files. Several modules with one name are stacked there along
    dim 0, in this order. ``read_too``: other forms in which files have some of the weights, which are read, never
    written. ``defaults``: keys that a config.json may leave out, as transformers fills them. ``read`` gives the fields
    that this family's keys mean, ``write`` is its inverse. ``biases`` are the keys that say where biases are.
    ``within`` is the model_type of a model of text and images whose text part this is, and ``unused`` matches the
    tensors of its other parts. ``predictors`` matches those of layers that predict further tokens, which are not
    trained unless asked for, and copied into exports (LAYERS stands for how many other layers there are);
    ``predictor`` are the names of what such a layer has besides a block's, ``predictor_block`` is that of the block
    (the first {} is the layer), ``predictor_count`` the config's key for how many there are, ``copies`` are those of
    tensors that are copies of a parameter. ``brings_code``: the files name Python code, which transformers has made its
    own since, and which is not needed here either. ``fields`` are those that all of its models share."""

    architecture: str
    names: Names
    read: Callable[[Config, str], Fields] = lambda config, name: {}
    write: Callable[[Fields], Config] = lambda fields: {}
    defaults: Config = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    within: str = ""
    unused: str = ""
    predictors: str = ""
    predictor: Names = field(default_factory=dict)
    predictor_block: str = "model.layers.{}"
    predictor_count: str = "num_nextn_predict_layers"
    copies: Mapping[str, str] = field(default_factory=dict)
    brings_code: bool = False
    fields: Fields = field(default_factory=dict)
    read_too: tuple[Names, ...] = ()


def row(model_type: str, names: Names, **code: Any) -> Family:
    """The family of this ``model_type``: what of it is ``code``, such as ``read``, and the facts in family.json."""
    facts = _FACTS[model_type]
    return Family(names=names, **code, **facts | {"biases": tuple(facts.get("biases", ()))})


def whole(config: Config, key: str, name: str) -> int:
    """A whole number of a config. Raises ConfigError (CFG004)."""
    value = config.get(key)
    if type(value) is not int:
        what = f"`{key}` must be a whole number, got {show_value(value)}"
        raise ConfigError(Problem("CFG004", what, f"config of {name}", f"{key}: a whole number"))
    return value


def optional(config: Config, key: str, name: str) -> float | None:
    """A number of a config, or None where it has none."""
    return None if config.get(key) is None else number(config, key, None, name)


def layers(config: Config, name: str, sliding: Callable[[int], bool]) -> Fields:
    """Window and layer types: those that the config lists, else by the family's rule. One type needs no list."""
    window, count = optional(config, "sliding_window", name), config["num_hidden_layers"]
    types = config.get("layer_types") or [SLIDING if sliding(layer) else FULL for layer in range(count)]
    if wrong := [kind for kind in types if kind not in (SLIDING, FULL)]:
        raise unsupported(f"layers of type {wrong[0]!r} are not supported", name, f"layer_types: {FULL} or {SLIDING}")
    if window is None or SLIDING not in types:
        return {}
    return {"sliding_window": int(window), "layer_types": tuple(types) if FULL in types else ()}


def layer_types(fields: Fields) -> list[str]:
    """The key ``layer_types`` of a config."""
    one = FULL if fields["sliding_window"] is None else SLIDING
    return list(fields["layer_types"]) or [one] * fields["num_hidden_layers"]


def all_sliding(config: Config, name: str) -> Fields:
    """Read the layers of a family that all have the window, if there is one."""
    return layers({**config, "layer_types": None}, name, lambda layer: True)


def window(fields: Fields) -> Config:
    """The key ``sliding_window`` of a config."""
    return {"sliding_window": fields["sliding_window"]}


def switched(config: Config, name: str, sliding: Callable[[int], bool]) -> Fields:
    """Read window and layer types as :func:`layers` does, for a family with a key that turns its window on."""
    size = config.get("sliding_window") if config.get("use_sliding_window") else None
    return layers({**config, "sliding_window": size}, name, sliding)


def write_switched(fields: Fields) -> Config:
    """The inverse of :func:`switched`."""
    switch = fields["sliding_window"] is not None
    return window(fields) | {"use_sliding_window": switch, "layer_types": layer_types(fields)}


def rotated_share(config: Config, name: str) -> Fields:
    """Return the share of each head that is rotated, in ``rope_parameters`` or beside them."""
    key, values = "partial_rotary_factor", config.get("rope_parameters") or {}
    return {key: number(values if key in values else config, key, 1.0, name)}


def refuse(config: Config, key: str, name: str) -> None:
    """Raise ConfigError (MOD001) for a config in which this key is on."""
    if config.get(key):
        raise unsupported(f"`{key}: {config[key]}` is not supported", name, f"{key}: null")
