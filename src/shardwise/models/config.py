"""The dimensions of a model and the kinds of its blocks, read from a Hugging Face ``config.json``. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from math import prod
from typing import Any, Literal

from shardwise.errors import ConfigError, Problem
from shardwise.models import rope
from shardwise.models.expert_shapes import expert_matrices, expert_problems, mlp_matrices
from shardwise.models.families import ACTIVATIONS, FAMILIES, activation, family_of, text_part
from shardwise.models.family import FULL, SLIDING, Fields
from shardwise.models.hf_spec import HFModel
from shardwise.models.kinds import AttentionSpec, DeltaSpec, ExpertSpec, LatentSpec, PositionSpec
from shardwise.models.mixers import MIXERS, mixer_of, mixers_of
from shardwise.models.roles import MULTIPLIED, is_expert
from shardwise.models.rope import RopeScaling, number, unsupported
from shardwise.spec.complaints import show_value
from shardwise.spec.hash_once import hash_once

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
HEADS = ("num_key_value_heads", "head_dim")
"""Whole numbers that a config may leave out."""
NUMBERS = ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "initializer_range")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""These and the keys above exist in every family, and have the same names in ModelSpec."""


@hash_once
@dataclass(frozen=True)
class ModelSpec:
    """The dimensions of one model and what its blocks are made of, named as Hugging Face names them where it has a
    name. Every feature has a neutral default, which costs nothing.

    norm_placement: of the norms of a block, before attention and MLP, after them, or both. norm_plus_one: norms
    multiply by 1 + weight. logits_scaling: what logits are divided by. intermediate_sizes: of each layer, where they
    differ; no family's config has them. hf_model: blocks that are not the decoder's. stored: how its files hold
    weights, where not in 16 or 32 bits. predictor_weight: of the loss of a last block that predicts more.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    attention: AttentionSpec = AttentionSpec()
    latent: LatentSpec = LatentSpec()
    delta: DeltaSpec = DeltaSpec()
    positions: PositionSpec = PositionSpec()
    experts: ExpertSpec = ExpertSpec()
    family: str = "llama"
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    mlp_bias: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | tuple[int, ...] | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | tuple[int, ...] | None = None
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"] = "silu"
    norm_placement: Literal["before", "after", "both"] = "before"
    norm_plus_one: bool = False
    final_soft_cap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    intermediate_sizes: tuple[int, ...] = ()
    hf_model: HFModel | None = None
    stored: str = ""
    predictor_weight: float = 0.0

    @property
    def predictors(self) -> int:
        """The number of blocks, the last ones, that predict a further token."""
        return int(self.predictor_weight > 0)

    def predicts(self, layer: int) -> bool:
        """Return whether this layer predicts a further token."""
        return layer >= self.num_hidden_layers - self.predictors

    def mlp_size(self, layer: int) -> int:
        """Return the width of this layer's MLP."""
        return self.intermediate_sizes[layer] if self.intermediate_sizes else self.intermediate_size

    @property
    def mlp_sizes(self) -> set[int]:
        """The widths of the MLPs, those that all tokens share beside experts included, but no experts."""
        if not self.experts:
            return {*self.intermediate_sizes} or {self.intermediate_size}
        dense = {self.intermediate_size} if self.experts.dense_layers else set()
        return dense | ({self.experts.shared_expert_size} if self.experts.shared_expert_size else set())

    def has_experts(self, layer: int) -> bool:
        """Return whether this layer has experts in the place of an MLP."""
        return bool(self.experts) and layer not in self.experts.dense_layers

    @property
    def expert_layers(self) -> int:
        """The number of layers that have experts."""
        return sum(self.has_experts(layer) for layer in range(self.num_hidden_layers))

    @property
    def expert_counts(self) -> int:
        """The number of values that a step counts of experts: two losses, each layer's loads and, with a capacity, its
        drops."""
        each = self.experts.num_experts + (self.experts.expert_capacity is not None)
        return 2 + self.expert_layers * each if self.expert_layers else 0

    @property
    def rotary_dim(self) -> int:
        """The number of elements of a head that are rotated."""
        own = int(self.attention.head_dim * self.positions.partial_rotary_factor)
        return self.latent.qk_rope_head_dim or own

    @property
    def value_dim(self) -> int:
        """Return how wide a head's values are."""
        return self.latent.v_head_dim or self.attention.head_dim


PARTS = {
    "attention": AttentionSpec,
    "latent": LatentSpec,
    "delta": DeltaSpec,
    "positions": PositionSpec,
    "experts": ExpertSpec,
}
"""The records within a ModelSpec."""
_PART = {field.name: part for part, record in PARTS.items() for field in fields(record)}


def model_spec(name: str, *sizes: int, **values: Any) -> ModelSpec:
    """A spec of these fields, its own and those of its records, each by its name alone; of ``SIZES`` and ``HEADS`` also
    in their order."""
    values |= dict(zip((*SIZES, *HEADS), sizes, strict=False))
    own = {key: value for key, value in values.items() if key not in _PART}
    return with_fields(ModelSpec(name, **own), **{key: value for key, value in values.items() if key in _PART})


def with_fields(spec: ModelSpec, **values: Any) -> ModelSpec:
    """The spec with other values of these fields, its own and those of its records, each by its name alone."""
    own = {key: value for key, value in values.items() if key not in _PART}
    for part in PARTS:
        if inner := {key: value for key, value in values.items() if _PART.get(key) == part}:
            own[part] = replace(vars(spec)[part], **inner)
    return replace(spec, **own)


def flat(spec: ModelSpec) -> Fields:
    """The fields of a spec and of its records by their names alone: the inverse of :func:`model_spec`."""
    values = asdict(spec)
    return {key: value for key, value in values.items() if key not in PARTS} | {
        key: value for part in PARTS for key, value in values[part].items()
    }


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer, by what may differ between the layers of one model: what a query sees, how positions enter, and
    how tokens are mixed. ``local``: with the rope theta of sliding layers, or, in a model of transformers, with
    whatever its sliding layers do differently."""

    window: int | None = None
    rotated: bool = True
    local: bool = False
    mixer: str = "softmax"


@lru_cache(maxsize=64)
def layer_kinds(spec: ModelSpec) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """The kinds of layer that a model has, in order of appearance, and the kind of each layer."""
    kinds: dict[LayerKind, int] = {}
    order = []
    window, types, positions = spec.attention.sliding_window, spec.attention.layer_types, spec.positions
    for layer in range(spec.num_hidden_layers):
        sliding = window is not None and (not types or types[layer] == SLIDING)
        local = sliding and (positions.local_rope_theta is not None or spec.hf_model is not None)
        mixer = mixer_of(spec, layer)
        rotated = mixer.rotated and layer not in positions.nope_layers
        kind = LayerKind(window if sliding else None, rotated, local, mixer.name)
        order.append(kinds.setdefault(kind, len(kinds)))
    return tuple(kinds), tuple(order)


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by its canonical name, in the model's order. Tied, there is no ``head.weight``."""
    if spec.hf_model is not None:
        return spec.hf_model.shapes(spec.num_hidden_layers)
    d = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (spec.vocab_size, d)}
    for layer in range(spec.num_hidden_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _of_block(spec, layer).items()}
    shapes["norm.weight"] = (d,)
    return shapes if spec.tie_word_embeddings else shapes | {"head.weight": (spec.vocab_size, d)}


@lru_cache(maxsize=1024)
def _of_block(spec: ModelSpec, layer: int) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter of a block."""
    d, experts, mixer = spec.hidden_size, spec.has_experts(layer), mixer_of(spec, layer)
    inner = expert_matrices(spec.experts, d, bias=spec.mlp_bias) if experts else {}
    inner = inner or mlp_matrices("mlp", d, spec.mlp_size(layer), bias=spec.mlp_bias)
    norms = _norms(spec) | {f"attention.{name}": size for name, size in mixer.norms(spec).items()}
    if spec.predicts(layer):
        norms |= dict.fromkeys(("main_norm", "embed_norm", "hidden_norm"), d)
        inner = {"join": ((d, 2 * d), False), **inner}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,) for name, size in norms.items()}
    mixing = {f"attention.{name}": matrix for name, matrix in mixer.matrices(spec).items()}
    for name, (shape, bias) in (mixing | inner).items():
        shapes[f"{name}.weight"] = shape
        if bias:
            shapes[f"{name}.bias"] = shape[:1]
    if experts and spec.experts.sigmoid is not None:
        shapes["mlp.router.correction"] = (spec.experts.num_experts,)
    return shapes | {f"attention.{name}": shape for name, shape in mixer.others(spec).items()}


def _norms(spec: ModelSpec) -> dict[str, int]:
    """Size of each norm of a block but its mixer's."""
    d, placement = spec.hidden_size, spec.norm_placement
    norms = {} if placement == "after" else {"attention_norm": d, "mlp_norm": d}
    if placement != "before":
        norms |= {"attention_after_norm": d, "mlp_after_norm": d}
    return norms


def learnt_positions(spec: ModelSpec) -> str | None:
    """The name of the table of learned positions, of ``max_position_embeddings`` rows; None if the model has none."""
    shapes = parameter_shapes(spec).items()
    return next((name for name, shape in shapes if len(shape) == 2 and not name.startswith(MULTIPLIED)), None)


def parameter_count(spec: ModelSpec) -> int:
    """The elements of all parameters; tied embeddings count once."""
    return sum(prod(shape) for shape in parameter_shapes(spec).values())


def active_parameter_count(spec: ModelSpec) -> int:
    """Count the elements of the parameters that compute a token: of the experts only the ones that it goes to."""
    shapes = parameter_shapes(spec).items()
    idle = sum(prod(shape) for name, shape in shapes if is_expert(name))
    return parameter_count(spec) - (
        idle - idle * spec.experts.experts_per_token // spec.experts.num_experts if spec.experts else 0
    )


def problems(spec: ModelSpec) -> list[Problem]:
    """Dimensions that no model can have."""
    found: list[Problem] = []

    def refuse(what: str, fix: str) -> None:
        found.append(Problem("PLAN008", what, where=f"config of {spec.name}", fix=fix))

    sizes = vars(spec)
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"):
        if sizes[key] < 1:
            refuse(f"{key} is {sizes[key]}", f"{key}: 1 or more")
    attention, positions, experts = spec.attention, spec.positions, spec.experts
    heads, kv_heads = attention.num_attention_heads, attention.num_key_value_heads
    if heads < 1 or kv_heads < 1:
        refuse(f"{heads} attention heads and {kv_heads} key-value heads", "1 or more of each")
    elif heads % kv_heads:
        legal = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        what = f"{kv_heads} key-value heads do not divide {heads} attention heads"
        refuse(what, f"num_key_value_heads: one of {legal}")
    if attention.head_dim < 2 or attention.head_dim % 2:
        what = f"head_dim {attention.head_dim} is not even, but rotary embedding rotates pairs"
        refuse(what, f"head_dim: {max(2, attention.head_dim + 1)}")
    elif spec.rotary_dim < 2 or spec.rotary_dim % 2:
        what = f"partial_rotary_factor {positions.partial_rotary_factor} rotates {spec.rotary_dim}, not an even number"
        refuse(what, "partial_rotary_factor: 1.0")
    of_mixers = [each for mixer in mixers_of(spec) for each in mixer.wrong(spec)]
    for what, fix in (*of_mixers, *expert_problems(experts)):
        refuse(what, fix)
    if attention.sliding_window is not None and attention.sliding_window < 1:
        refuse(f"sliding_window is {attention.sliding_window}", "sliding_window: 1 or more, or null")
    if attention.layer_types and len(attention.layer_types) != spec.num_hidden_layers:
        what = f"{len(attention.layer_types)} layer_types for {spec.num_hidden_layers} layers"
        refuse(what, f"layer_types: {spec.num_hidden_layers} of {FULL} or {SLIDING}")
    scaling = positions.rope_scaling
    if scaling is not None and scaling.kind == "longrope":
        for key, factors in (("short_factor", scaling.short_factor), ("long_factor", scaling.long_factor)):
            if len(factors) != spec.rotary_dim // 2:
                refuse(f"rope: {len(factors)} numbers in {key}", f"{key}: {spec.rotary_dim // 2} numbers")
    if scaling is not None and scaling.kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        what = f"rope: high_freq_factor {scaling.high_freq_factor} is not above"
        refuse(f"{what} low_freq_factor {scaling.low_freq_factor}", "high_freq_factor: 4.0, low_freq_factor: 1.0")
    return found


def from_hf(config: dict[str, Any], name: str) -> ModelSpec:
    """The spec that a Hugging Face ``config.json`` describes (transformers 4 and 5)."""
    config = text_part(config)
    model_type, where = family_of(config, name), f"config of {name}"
    if model_type is None:
        what = f"model_type {config.get('model_type')!r} is not one of the supported families"
        raise unsupported(what, name, f"a model of one of these: {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    config = {**family.defaults, **config}
    shown = {key: show_value(config.get(key)) for key in (*SIZES, *HEADS, *TOKENS)}
    wrong = [
        Problem("CFG004", f"`{key}` must be a whole number, got {shown[key]}", where, f"{key}: a whole number")
        for key in (*SIZES, *HEADS)
        if type(config.get(key)) is not int and (key in SIZES or config.get(key) is not None)
    ]
    wrong += [
        Problem("CFG004", f"`{key}` must be the id of a token, got {shown[key]}", where, f"{key}: null")
        for key in TOKENS
        if not all(type(one) is int for one in _listed(config.get(key)))
    ]
    if wrong:
        raise ConfigError(*wrong)
    heads = config["num_attention_heads"]
    longest = int(number(config, "max_position_embeddings", 2048, name))
    theta, scaling = _rope(config, longest, name)
    values: Fields = {key: bool(config.get(key, False)) for key in family.biases}
    values |= {key: config[key] for key in SIZES} | {
        "num_key_value_heads": heads if config.get("num_key_value_heads") is None else config["num_key_value_heads"],
        "head_dim": _head_dim(config, where),
        "activation": activation(config, name),
        "rms_norm_eps": number(config, "rms_norm_eps", 1e-6, name),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": longest,
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "initializer_range": number(config, "initializer_range", 0.02, name),
        **{key: tuple(ids) if isinstance(ids := config.get(key), list) else ids for key in TOKENS},
    }
    values |= family.fields | family.read(config, name)
    if (mixer := values.get("mixer", "softmax")) not in MIXERS:
        raise unsupported(f"its mixer {mixer!r} is not installed", name, f"one of {', '.join(MIXERS)}")
    spec = model_spec(name, family=model_type, **values)
    if found := problems(spec):
        raise ConfigError(*found)
    return spec


def _listed(value: Any) -> list[Any]:
    """A token id, a list of them, or None, as a list."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _head_dim(config: dict[str, Any], where: str) -> int:
    heads, head_dim = config["num_attention_heads"], config.get("head_dim")
    if head_dim is not None:
        return int(head_dim)
    if heads < 1 or config["hidden_size"] % heads:
        what = f"hidden_size {config['hidden_size']} / {heads} heads is not whole"
        raise ConfigError(Problem("PLAN008", what, where, f"hidden_size: a multiple of {heads}, or give head_dim"))
    return int(config["hidden_size"]) // int(heads)


def _rope(config: dict[str, Any], longest: int, name: str) -> tuple[float, RopeScaling | None]:
    """theta and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before);
    where sliding layers have their own, those of the full ones."""
    values: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    values = values.get(FULL, values) or {}
    theta = number(values if "rope_theta" in values else config, "rope_theta", 10_000.0, name)
    original = config.get("original_max_position_embeddings")
    return theta, rope.read(values, longest, None if original is None else int(original), name)


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """The ``config.json`` of ``spec``, with the keys of transformers 5 and of 4."""
    eos = list(spec.eos_token_id) if isinstance(spec.eos_token_id, tuple) else spec.eos_token_id
    if spec.hf_model is not None:
        return json.loads(spec.hf_model.config) | {"eos_token_id": eos, "bos_token_id": spec.bos_token_id}
    if spec.intermediate_sizes:
        raise ValueError(f"no config says that the MLPs of {spec.name} differ in width")
    family, values = FAMILIES[spec.family], flat(spec)
    act = next((theirs for theirs, ours in ACTIVATIONS.items() if ours == spec.activation), "silu")
    stretch = rope.write(spec.positions.rope_scaling)
    config = {key: values[key] for key in (*SIZES, *HEADS, *NUMBERS, *TOKENS, *family.biases)}
    return config | {
        "architectures": [family.architecture],
        "model_type": spec.family,
        "hidden_act": act,
        "hidden_activation": act,
        **_write_rope(spec, stretch),
        "rope_scaling": None if spec.positions.rope_scaling is None else stretch,
        "attention_dropout": 0.0,
        "eos_token_id": eos,
        "use_cache": True,
        **family.write(values),
    }


def _write_rope(spec: ModelSpec, stretch: dict[str, Any]) -> dict[str, Any]:
    parameters = stretch | {"rope_theta": spec.positions.rope_theta}
    if spec.positions.partial_rotary_factor != 1.0:
        parameters["partial_rotary_factor"] = spec.positions.partial_rotary_factor
    config = {"rope_theta": spec.positions.rope_theta, "rope_parameters": parameters}
    if spec.positions.local_rope_theta is None:
        return config
    local = {"rope_type": "default", "rope_theta": spec.positions.local_rope_theta}
    by_layer = {"rope_parameters": {FULL: parameters, SLIDING: local}}
    return config | by_layer | {"rope_local_base_freq": spec.positions.local_rope_theta}
