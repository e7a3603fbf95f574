"""Every set of features that a family of models can have ships, in symbols that come to what each model has."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from itertools import product
from typing import Any

import pytest

from shardwise.models.config import ModelSpec, from_hf, problems
from shardwise.models.families import ACTIVATIONS, FAMILIES, FULL, SLIDING
from shardwise.models.load import load_spec
from shardwise.planner.features import PRIMES, assembled, name_of, templates
from shardwise.planner.sheets import sheet_of, shipped
from shardwise.planner.symbols import FACTORS, named
from shardwise.planner.trace import MICRO_BATCH, SEQ_LEN, trace_as_it_is, trace_template
from shardwise.spec.sheet import SYMBOLS, Op, Sheet, Tensor, Unit
from tests.models.families import CONFIGS

MODELS = {
    "Llama-2-7b": "narrow",
    "Llama-3.1-405B": "narrow",
    "TinyLlama-1.1B": "wide",
    "Mistral-Nemo-2407": "narrow",
    "Qwen2.5-7B": "wide",
    "Qwen3-32B": "narrow",
    "Gemma-2-9b": "narrow",
    "Gemma-3-1b": "wide",
    "Phi-3-mini-4k": "narrow",
    "SmolLM3-3B": "narrow",
    "OLMo-2-1124-7B": "wide",
    "Granite-3.1-8b-base": "narrow",
}
"""Of every family one at least; Gemma 3 1B has one key head, Llama 2 one query head for each, SmolLM3 blocks that do
not rotate, OLMo 2 norms over the whole projection."""


def unmarked(sheet: Sheet) -> Sheet:
    """Without what a sheet that was traced with its own numbers cannot say."""

    def plain(tensor: Tensor) -> Tensor:
        return replace(tensor, symbols=(), inside=False)

    def unit(one: Unit) -> Unit:
        forward, unsaved, backward = (
            tuple(replace(op, symbols="") for op in ops) for ops in (one.forward, one.forward_plain, one.backward)
        )
        weights, tensors = tuple(map(plain, one.weights)), tuple(map(plain, one.tensors))
        changed = {"forward": forward, "forward_plain": unsaved, "backward": backward}
        return replace(one, weights=weights, tensors=tensors, **changed)

    return replace(sheet.rewritten(unit), sizes={}, cells={}, types="")


@pytest.mark.matrix(3)
@pytest.mark.parametrize("model", MODELS)
def test_symbols_come_to_what_a_trace_with_the_models_numbers_sees(model: str) -> None:
    """Tensor by tensor and operation by operation: sizes, types, order, what is freed when, what is saved, FLOPs."""
    spec = load_spec(model)
    bound, seen = (unmarked(make(spec, MODELS[model])) for make in (sheet_of, trace_as_it_is))
    for mine, theirs in zip(bound.units, seen.units, strict=True):
        for field in fields(Unit):
            assert getattr(mine, field.name) == getattr(theirs, field.name), f"{field.name} of a {mine.name}"
    assert asdict(bound) == asdict(seen)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_small_models_of_every_family_too(family: str) -> None:
    """With features at work that no well-known model has, on numbers that are drawn."""
    for seed in (1, 2):
        config = CONFIGS[family](random.Random(seed)) | {"model_type": family}
        spec = from_hf(config, "drawn")
        for variant in ("narrow", "wide"):
            made = assembled(spec, lambda what, template, variant=variant: trace_template(variant, what, template))
            assert asdict(unmarked(made)) == asdict(unmarked(trace_as_it_is(spec, variant)))


SAID: dict[str, tuple[Any, ...]] = {
    "hidden_act": tuple(ACTIVATIONS),
    "attention_bias": (False, True),
    "mlp_bias": (False, True),
    "tie_word_embeddings": (False, True),
    "num_attention_heads": (1, 4),
    "num_key_value_heads": (1, 2),
    "rope_scaling": (
        None,
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 16},
        {"rope_type": "yarn", "factor": 2.0},
        {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
    ),
    "use_sliding_window": (False, True),
    "sliding_window": (None, 8),
    "layer_types": ([FULL] * 3, [SLIDING] * 3, [SLIDING, FULL, FULL], [FULL, SLIDING, SLIDING]),
    "no_rope_layers": ([1, 1, 1], [1, 0, 1], [0, 0, 0]),
    "partial_rotary_factor": (1.0, 0.5),
    "embedding_multiplier": (1.0, 3.0),
    "residual_multiplier": (1.0, 3.0),
    "logits_scaling": (1.0, 3.0),
}
"""All that a config.json may say of a model's features."""
UNSEEN = ("sliding_window", "tie_word_embeddings", "attention_soft_cap", "final_soft_cap")
"""Fields that no unit depends on, or on whose other values all is decided already."""


def reachable(family: str) -> Iterator[ModelSpec]:
    """Every combination of the values that some config.json gives to a field of this family's models."""
    base = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
    base |= {"model_type": family, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    base |= {"sliding_window": 8, "use_sliding_window": True}
    first, found = from_hf(base, "x"), dict[str, dict[Any, None]]()
    for key, values in SAID.items():
        for value in values:
            heads = {"num_key_value_heads": 1} if key == "num_attention_heads" else {}
            config = base | {key: value} | heads
            if key == "partial_rotary_factor":  # of another number of factors
                config["rope_scaling"] = None
            spec = from_hf(config, "x")
            for field in fields(ModelSpec):
                mine = getattr(spec, field.name)
                if mine != getattr(first, field.name) and field.name not in UNSEEN:
                    found.setdefault(field.name, {getattr(first, field.name): None})[mine] = None
    for values in product(*found.values()):
        spec = replace(first, **dict(zip(found, values, strict=True)))
        longrope = spec.rope_scaling is not None and spec.rope_scaling.kind == "longrope"
        if not problems(spec) or longrope:  # whose factors are of whole heads
            yield spec


@pytest.mark.parametrize("family", FAMILIES)
def test_every_set_of_features_ships(family: str) -> None:
    """A change of the models or of the tracer needs ``python -m shardwise.planner.ship``."""
    wanted = {unit for spec in reachable(family) for unit in templates(spec)}
    names = {name_of(what, template, variant) for what, template in wanted for variant in ("narrow", "wide")}
    assert names and names <= shipped().keys()


def test_primes_are_primes_and_distinct() -> None:
    numbers = [*FACTORS.values(), MICRO_BATCH, SEQ_LEN]
    assert len(set(numbers)) == len(numbers) == len(SYMBOLS)
    assert all(number % divisor for number in numbers for divisor in range(2, int(number**0.5) + 1))


def test_sizes_are_read_as_products() -> None:
    d, heads, e = PRIMES["d"], PRIMES["K"] * PRIMES["G"], PRIMES["e"]
    assert [named(size) for size in (0, 3, d, 2 * d * heads * e, e // 2, 6 * PRIMES["p"])] == [
        0,
        3,
        "d",
        "2*d*K*G*e",
        "p",
        "6*p",
    ]
    with pytest.raises(ValueError, match="is no product of the symbols"):
        named(d + heads)


def test_a_sheet_can_be_bound_to_other_sizes() -> None:
    """As tensor parallelism will: with half the key heads, what has heads is half as large, and nothing else is."""
    sheet = sheet_of(load_spec("Llama-3-70B"), "narrow")
    half = sheet.bound({**sheet.sizes, "K": sheet.sizes["K"] // 2})
    for before, after in zip(sheet.blocks[0].tensors, half.blocks[0].tensors, strict=True):
        share = 2 if any("K" in str(dim) for dim in before.symbols) else 1
        assert before.numel(2, 3) == share * after.numel(2, 3)
    q = next(op for op in half.blocks[0].forward if op.weight == "attention.q.weight")
    assert q.symbols == "2*d*K*G*e" and q.flops == 8192 * 8192
    assert asdict(half.bound(sheet.sizes)) == asdict(sheet)


def block_of(model: str, variant: str = "narrow") -> Unit:
    return sheet_of(load_spec(model), variant).blocks[0]


@pytest.mark.parametrize("model", MODELS)
def test_what_is_cut_by_heads_or_columns_is_inside_and_what_is_added_to_the_stream_is_not(model: str) -> None:
    """Whatever a model is made of: tensor parallelism cuts the one and, with its sequence, the tokens of the other."""
    unit = block_of(model, MODELS[model])
    inside = [tensor.inside for tensor in unit.tensors]
    for tensor in unit.tensors:
        if {"K", "G", "e", "p", "f"} & {symbol for dim in tensor.symbols for symbol in str(dim).split("*")}:
            assert tensor.inside == bool({"b", "s", "b*s"} & set(tensor.shape))
    products = [op for op in unit.forward if op.kind in ("matmul", "attention")]
    assert len(products) == 8 and all(inside[tensor] for op in products for tensor in op.allocates)
    into_columns = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    for op in unit.backward:
        if op.kind == "matmul" and op.weight.removesuffix(".weight") in into_columns:
            assert all(inside[tensor] for tensor in op.allocates)  # a rank's part of a sum over ranks
    added = [op for op in unit.forward if op.name == "aten.add.Tensor" and len(op.reads) == 2]
    assert len(added) == 2 and not any(inside[tensor] for op in added for tensor in op.allocates)
    assert not any(inside[i] for i in (unit.gradient_in, unit.gradient_out, unit.output) if i >= 0)


def test_the_stream_of_a_llama_block() -> None:
    """Operation by operation. Of the sums of gradients those of q, k and v, and of gate and up, are inside."""
    unit = block_of("Llama-3-8B")

    def stream(ops: tuple[Op, ...]) -> list[str]:
        made = [
            (op, tensor) for op in ops for tensor in op.allocates if {"b", "s", "b*s"} & set(unit.tensors[tensor].shape)
        ]
        return [op.name.removeprefix("aten.") for op, tensor in made if not unit.tensors[tensor].inside]

    norm = ["_to_copy", "linalg_vector_norm", "mul.Tensor", "_to_copy"]
    assert stream(unit.forward) == [*norm, "add.Tensor", *norm, "add.Tensor"]
    sums = [op for op in unit.backward if op.name == "aten.add.Tensor"]
    assert [unit.tensors[op.allocates[0]].inside for op in sums] == [True, False, True, True, False]


def test_statistics_of_a_norm_over_all_heads_are_inside() -> None:
    """OLMo 2: a number for each token, as of the norms of the stream, but summed over heads."""
    unit = block_of("OLMo-2-1124-7B", "wide")
    narrow = [i for i, tensor in enumerate(unit.tensors) if tensor.symbols in (("b", "s", 1), ("b", "s"))]
    made = {i: op for op in unit.forward for i in op.allocates}
    statistics = [i for i in narrow if i in made and made[i].name == "aten.linalg_vector_norm"]
    assert [unit.tensors[i].inside for i in statistics] == [True, True, False, False]  # q, k; attention, MLP
