"""The variants of a model's units: which of its features change their program, and which only sizes in it. No torch.

A variant (techniques/variant.py) begins as a *template*: a ModelSpec with the model's features, and in the place of its
numbers distinct primes. What techniques do inside the unit is added by ``techniques.traced``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise import techniques
from shardwise.models.config import LayerKind, ModelSpec, layer_kinds, model_spec, with_fields
from shardwise.models.families import FULL, SLIDING
from shardwise.models.kinds import GroupedRouting, SigmoidRouting
from shardwise.models.mixer import Mixer
from shardwise.models.mixers import mixer_of
from shardwise.models.rope import RopeScaling
from shardwise.spec.plan import Batch, Plan
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.sheet import Sizes
from shardwise.techniques.variant import Traced, Variant

PRIMES = {
    "V": 227,
    "d": 64 * 211,
    "f": 64 * 223,
    "K": 101,
    "G": 103,
    "e": 64 * 107,
    "p": 97,
    "E": 53,
    "M": 47,
    "h": 64 * 233,
}
"""The number that stands for each symbol. A row of d, f or e is whole blocks of 64, as 4 bits ask, so that half a head
is a product too."""
MIXED = {"a": 64 * 239, "l": 64 * 241, "v": 64 * 251, "k": 113, "g": 127, "q": 8_387, "y": 64 * 137}
"""Of symbols that only some mixers use. ``q*y`` is no multiple of what is kept of a state for each token, or a whole
state would be taken for so many times that."""
GROWING = {"b": 1_009, "s": 1_013}
"""Of the micro-batch and the sequence. Larger ones would not leave room for the sizes of storages."""


def _spec(numbers: Sizes, **features: Any) -> ModelSpec:
    key_heads, heads = numbers["K"], numbers["K"] * numbers["G"]
    sizes = (numbers["V"], numbers["d"], numbers["f"], 1, heads, key_heads, numbers["e"])
    return model_spec("template", *sizes, **features)


def sizes(spec: ModelSpec, unit: int | str = 0) -> Sizes:
    """Return the numbers that a unit of a model (``embedding``, ``head`` or a block's number) binds to the symbols."""
    mixer = mixer_of(spec, unit if isinstance(unit, int) else 0)
    own = {
        "V": spec.vocab_size,
        "d": spec.hidden_size,
        "f": _width(spec, unit) if isinstance(unit, int) else spec.intermediate_size,
        "E": spec.experts.num_experts,
        "M": spec.experts.experts_per_token,
        "h": spec.experts.shared_expert_size,
        "K": spec.attention.num_key_value_heads,
        "G": spec.attention.num_attention_heads // spec.attention.num_key_value_heads,
        "e": spec.attention.head_dim,
        "p": spec.rotary_dim // 2,
        **mixer.sizes(spec),
    }
    return {**own, **_sums(mixer, own)}


def _sums(mixer: Mixer, numbers: Sizes) -> Sizes:
    """Return the sizes that are no products of symbols: what of a head is not rotated, and the mixer's own."""
    return {"e-2p": numbers["e"] - 2 * numbers["p"], **mixer.sums(dict(numbers))}


def _width(spec: ModelSpec, layer: int) -> int:
    return spec.experts.expert_size if spec.has_experts(layer) else spec.mlp_size(layer)


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


def _on(coefficient: float) -> float:
    """A coefficient's stand-in: 0 leaves a loss out."""
    return float(coefficient != 0.0)


def _routing(own: SigmoidRouting | None) -> SigmoidRouting | None:
    """A router's stand-in: groups are chosen within one operation."""
    return None if own is None else SigmoidRouting(scale=_switched(own.scale))


def _rotating(numbers: Sizes) -> float:
    """The share of a head that is rotated in pairs; half an element more, so that it is not rounded to fewer."""
    return (2 * numbers["p"] + 0.5) / numbers["e"]


def _embedding(spec: ModelSpec) -> tuple[ModelSpec, Sizes]:
    """The template of the embedding and the rotation tables."""
    numbers = _numbers(spec, "Vdp")
    tables = tuple(dict.fromkeys(kind.local for kind in layer_kinds(spec)[0] if kind.rotated))
    predictor = _on(spec.predictor_weight)
    template = _spec(numbers, embedding_multiplier=_switched(spec.embedding_multiplier), predictor_weight=predictor)
    if not tables:
        return with_fields(template, nope_layers=(0,)), numbers
    template = with_fields(template, partial_rotary_factor=_rotating(numbers))
    if True in tables:
        types = tuple(SLIDING if local else FULL for local in tables)
        template = with_fields(template, sliding_window=1, local_rope_theta=2.0, num_hidden_layers=len(tables))
        template = with_fields(template, layer_types=types if len(tables) > 1 else ())
    if spec.positions.rope_scaling is None or False not in tables:
        return template, numbers
    factors = (1.0,) * numbers["p"] if spec.positions.rope_scaling.kind == "longrope" else ()
    scaling = RopeScaling(spec.positions.rope_scaling.kind, 2.0, short_factor=factors, long_factor=factors)
    return with_fields(template, rope_scaling=scaling), numbers


def _block(spec: ModelSpec, kind: LayerKind, unit: int) -> tuple[ModelSpec, Sizes]:
    """The template of a block. What a layer sees changes what it computes, but not what it allocates."""
    partial = spec.rotary_dim < spec.attention.head_dim and kind.rotated
    experts = spec.has_experts(unit)
    shared = experts and spec.experts.shared_expert_size > 0
    mixer = mixer_of(spec, unit)
    of_mixer = {symbol: prime for symbol, prime in MIXED.items() if symbol in mixer.symbols}
    numbers = dict(_numbers(spec, "dfKGe" + "p" * partial + "EM" * experts + "h" * shared))
    numbers |= of_mixer | dict.fromkeys(mixer.ones, 1)
    template = _spec(
        numbers,
        mixer=mixer.name,
        mixer_options=spec.attention.mixer_options,
        mlp_bias=spec.mlp_bias,
        activation=spec.activation,
        norm_placement=spec.norm_placement,
        norm_plus_one=spec.norm_plus_one,
        residual_multiplier=_switched(spec.residual_multiplier),
        partial_rotary_factor=_rotating(numbers) if partial and not of_mixer else 1.0,
        nope_layers=() if kind.rotated else (0,),
        predictor_weight=float(spec.predicts(unit)),
        **mixer.template(spec, numbers),
    )
    if experts:
        how = spec.experts.softmax_groups
        template = with_fields(
            template,
            num_experts=numbers["E"],
            experts_per_token=numbers["M"],
            expert_size=numbers["f"],
            expert_bias=spec.experts.expert_bias,
            router_bias=spec.experts.router_bias,
            normalised_top_k=spec.experts.normalised_top_k,
            shared_expert_size=numbers["h"] if shared else 0,
            shared_expert_gate=spec.experts.shared_expert_gate,
            sigmoid=_routing(spec.experts.sigmoid),
            softmax_groups=how and GroupedRouting(scale=_switched(how.scale)),
            router_aux_loss_coef=_on(spec.experts.router_losses[0]),
            router_z_loss_coef=_on(spec.experts.router_losses[1]),
        )
    return template, {**numbers, **(_sums(mixer, numbers) if partial or of_mixer else {"p": 1})}


def _head(spec: ModelSpec) -> tuple[ModelSpec, Sizes]:
    """The template of what follows the blocks, short of the output layer's product."""
    numbers, divided = _numbers(spec, "Vd"), _switched(spec.logits_scaling)
    own = {"tie_word_embeddings": spec.tie_word_embeddings, "predictor_weight": _on(spec.predictor_weight)}
    return _spec(numbers, norm_plus_one=spec.norm_plus_one, logits_scaling=divided, **own), numbers


def chosen(spec: ModelSpec, plan: Plan, rank_kind: RankKind, unit: int | str) -> Traced:
    """The variant of a unit of a model (``embedding``, ``head`` or a block's number) under a plan, and the numbers of
    its symbols on a kind of rank."""
    return techniques.traced(_begun(spec, unit, type(plan)), spec, plan, rank_kind)


def _begun(spec: ModelSpec, unit: int | str, make_plan: type[Plan]) -> Traced:
    kinds, order = layer_kinds(spec)
    grown = make_plan(batch=Batch(GROWING["b"], 1, GROWING["s"]))
    what: Any = unit if isinstance(unit, str) else "block"
    if spec.hf_model is not None:
        block = order.index(order[unit]) if isinstance(unit, int) else 0
        return Traced(Variant(what, replace(spec, name=""), grown, tuple(GROWING.items()), block=block), unit)
    ends = {"embedding": _embedding, "head": _head}
    model, numbers = ends[unit](spec) if isinstance(unit, str) else _block(spec, kinds[order[unit]], unit)
    # Sums first: what is a multiple of one is no product of the others.
    atoms = sorted(
        ((symbol, prime) for symbol, prime in numbers.items() if prime > 2),
        key=lambda atom: not {"-", "+"} & {*atom[0]},
    )
    return Traced(Variant(what, model, grown, (*atoms, *GROWING.items())), unit, sizes(spec, unit))
