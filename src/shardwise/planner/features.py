"""What of a model changes the program of its units, and what only the sizes in it. No torch.

A unit (stem, block, tail) is traced from a *template*: a ModelSpec that has the model's features, and in the place of
its numbers distinct primes, so that every size that is seen can be read as a product of symbols. Models with equal
templates share the unit; each binds its own numbers to the symbols.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Literal

from shardwise.models.config import LayerKind, ModelSpec, layer_kinds
from shardwise.models.families import FULL, SLIDING
from shardwise.models.rope import RopeScaling
from shardwise.spec.sheet import Sheet, Sizes, Tensor, Unit
from shardwise.techniques.tp import own_part

What = Literal["stem", "block", "tail"]
PRIMES = {"V": 227, "d": 211, "f": 223, "K": 101, "G": 103, "e": 2 * 107, "p": 97}
"""The number that stands for each symbol in a template. Heads are rotated in pairs, so their size is even."""


def _spec(numbers: Sizes, **features: Any) -> ModelSpec:
    key_heads, heads = numbers["K"], numbers["K"] * numbers["G"]
    sizes = (numbers["V"], numbers["d"], numbers["f"], 1, heads, key_heads, numbers["e"])
    return ModelSpec("template", *sizes, **features)


NEUTRAL = _spec(PRIMES)
"""The template of a model without features."""


def sizes(spec: ModelSpec) -> Sizes:
    """What a model binds to the symbols."""
    return {
        "V": spec.vocab_size,
        "d": spec.hidden_size,
        "f": spec.intermediate_size,
        "K": spec.num_key_value_heads,
        "G": spec.num_attention_heads // spec.num_key_value_heads,
        "e": spec.head_dim,
        "p": spec.rotary_dim // 2,
    }


def _numbers(spec: ModelSpec, symbols: str) -> Sizes:
    """Primes for these symbols, but 1 where the model has 1: of one head torch makes fewer copies. A single query head
    for each of several key heads is like several."""
    own = sizes(spec)
    ones = {symbol for symbol in symbols if own[symbol] == 1 and (symbol != "G" or own["K"] == 1)}
    numbers = {symbol: 1 if symbol in ones else prime for symbol, prime in PRIMES.items()}
    return numbers | ({"e": 2} if "e" in symbols and own["e"] == 2 else {})


def _switched(value: float) -> float:
    """A factor's stand-in: 1 does nothing, and of the others each does the same."""
    return 1.0 if value == 1.0 else 2.0


def _rotating(numbers: Sizes) -> float:
    """The share of a head that is rotated in pairs; half an element more, so that it is not rounded to fewer."""
    return (2 * numbers["p"] + 0.5) / numbers["e"]


def stem(spec: ModelSpec) -> ModelSpec:
    """The template of the embedding and the rotation tables."""
    numbers = _numbers(spec, "Vdp")
    tables = tuple(dict.fromkeys(kind.local for kind in layer_kinds(spec)[0] if kind.rotated))
    template = _spec(numbers, embedding_multiplier=_switched(spec.embedding_multiplier))
    template = replace(template, partial_rotary_factor=_rotating(numbers))
    if not tables:
        return replace(template, nope_layers=(0,))
    if True in tables:
        types = tuple(SLIDING if local else FULL for local in tables)
        template = replace(template, sliding_window=1, local_rope_theta=2.0, num_hidden_layers=len(tables))
        template = replace(template, layer_types=types if len(tables) > 1 else ())
    if spec.rope_scaling is None or False not in tables:
        return template
    factors = (1.0,) * numbers["p"] if spec.rope_scaling.kind == "longrope" else ()
    return replace(template, rope_scaling=RopeScaling(spec.rope_scaling.kind, 2.0, **_each(factors)))


def _each(factors: tuple[float, ...]) -> dict[str, Any]:
    return {"short_factor": factors, "long_factor": factors}


def block(spec: ModelSpec, kind: LayerKind) -> ModelSpec:
    """The template of a block. What a layer sees changes what it computes, but not what it allocates."""
    partial = spec.rotary_dim < spec.head_dim and kind.rotated
    numbers = _numbers(spec, "dfKGe" + "p" * partial)
    return _spec(
        numbers,
        attention_bias=spec.attention_bias,
        attention_output_bias=None if spec.output_bias == spec.attention_bias else spec.output_bias,
        mlp_bias=spec.mlp_bias,
        activation=spec.activation,
        norm_placement=spec.norm_placement,
        norm_plus_one=spec.norm_plus_one,
        qk_norm=spec.qk_norm,
        residual_multiplier=_switched(spec.residual_multiplier),
        partial_rotary_factor=_rotating(numbers) if partial else 1.0,
        nope_layers=() if kind.rotated else (0,),
    )


def tail(spec: ModelSpec) -> ModelSpec:
    """The template of what follows the blocks, short of the output layer."""
    divided = _switched(spec.logits_scaling)
    return _spec(_numbers(spec, "d"), norm_plus_one=spec.norm_plus_one, logits_scaling=divided)


def name_of(what: What, template: ModelSpec, variant: str) -> str:
    """``block narrow attention_bias=True``: what tells a unit from all others, for people too."""
    differing = {
        field.name: getattr(template, field.name)
        for field in fields(template)
        if getattr(template, field.name) != getattr(NEUTRAL, field.name)
    }
    if template.rope_scaling is not None:
        differing["rope_scaling"] = template.rope_scaling.kind
    return " ".join([what, variant, *(f"{key}={value}" for key, value in differing.items())])


def templates(spec: ModelSpec) -> list[tuple[What, ModelSpec]]:
    """Those of all units of a model."""
    kinds, _ = layer_kinds(spec)
    blocks: list[tuple[What, ModelSpec]] = [("block", block(spec, kind)) for kind in kinds]
    return [("stem", stem(spec)), *dict.fromkeys(blocks), ("tail", tail(spec))]


def assembled(spec: ModelSpec, unit: Callable[[What, ModelSpec], Unit], ranks: int = 1) -> Sheet:
    """The sheet of a model of the decoder's families, from the ``unit`` of each template, bound to its sizes; of one of
    ``ranks`` that compute a part of it each."""
    kinds, _ = layer_kinds(spec)
    own = own_part(spec, ranks)
    made = {named: unit(*named) for named in templates(own)}
    blocks = [made["block", block(own, kind)] for kind in kinds]
    made_of = joined(spec, made["stem", stem(own)], blocks, made["tail", tail(own)])
    return replace(made_of.bound(sizes(own)), ranks=ranks)


def joined(spec: ModelSpec, stem: Unit, traced: list[Unit], tail: Unit) -> Sheet:
    """A sheet of units, with the weight of the output layer where it has its own."""
    kinds, order = layer_kinds(spec)
    if not spec.tie_word_embeddings:
        symbols = () if spec.hf_model is not None else ("V", "d")
        shape = (spec.vocab_size, spec.hidden_size)
        head = Tensor("head.weight", shape, "weights", "weights", symbols=symbols)
        tail = replace(tail, weights=(*tail.weights, head))
    seen = tuple(replace(block, window=kind.window) for kind, block in zip(kinds, traced, strict=True))
    capped = spec.final_soft_cap is not None
    made = Sheet(spec.name, stem, seen, order, tail, spec.tie_word_embeddings, capped=capped)
    return replace(made, key_heads=spec.num_key_value_heads, heads_apart=spec.qk_norm != "projection")
