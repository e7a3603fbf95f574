"""Units in symbols come to what a trace with the numbers of a model and a plan sees: everything, in order."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest

from shardwise.models.config import ModelSpec, with_fields
from shardwise.models.lookup import load_spec
from shardwise.planner import ship
from shardwise.planner.symbols import Symbols
from shardwise.planner.trace import trace, trace_once
from shardwise.planner.variants import GROWING, PRIMES, chosen
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Plan, Precision, Shard
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.sheet import Op, Unit, size_of
from shardwise.techniques import lora, tp
from shardwise.techniques.variant import ODD_ROWS, Traced

NARROW = Precision("bf16", "bf16")
CASES: dict[str, tuple[str, Plan]] = {
    "alone": ("Llama-3-8B", Plan(batch=Batch(2, 1, 512))),
    "one key head": ("Gemma-3-1b", Plan(batch=Batch(2, 1, 512), precision=NARROW)),
    "no rotation in some": ("SmolLM3-3B", Plan(batch=Batch(2, 1, 512), precision=NARROW)),
    "part of a head rotates": ("Phi-3-mini-4k", Plan(batch=Batch(1, 1, 500), precision=NARROW)),
    "cast at use": ("Qwen3-32B", Plan(batch=Batch(2, 1, 512), precision=Precision("bf16"))),
    "modules": ("Llama-3-8B", Plan(batch=Batch(2, 1, 64), precision=Precision("bf16", modules=(("*norm", "fp32"),)))),
    "frozen": ("Llama-3-8B", Plan(batch=Batch(2, 1, 64), frozen=("embed.*", "*.attention.*"))),
    "even": ("Llama-3-8B", Plan(Layout(tp=8), Batch(1, 1, 4096), precision=NARROW, sequence_parallel=True)),
    "uneven, few": ("Llama-3-8B", Plan(Layout(tp=16), Batch(1, 1, 1001), precision=NARROW, sequence_parallel=True)),
    "whole, biases": ("Qwen2.5-7B", Plan(Layout(tp=4), Batch(3, 1, 512), precision=NARROW)),
    "norms over projections": ("OLMo-2-1124-7B", Plan(Layout(tp=2), Batch(1, 1, 4095), sequence_parallel=True)),
    "dropout": ("Llama-3-8B", Plan(Layout(tp=2), Batch(2, 1, 64), lora=Lora(8, dropout=0.1))),
    "magnitudes": ("Qwen2.5-7B", Plan(batch=Batch(2, 1, 64), precision=NARROW, lora=Lora(8, dora=True, frozen="bf16"))),
    "nf4, few": ("Llama-3-8B", Plan(Layout(tp=16), Batch(2, 1, 64), precision=NARROW, lora=Lora(8, nf4=True))),
}


def with_own_numbers(made: Traced, spec: ModelSpec, plan: Plan) -> Unit:
    """The unit of the same program, traced with the model's and the plan's numbers in the place of primes."""
    variant = made.variant
    layers = 1 if variant.what == "block" else spec.num_hidden_layers
    kinds = {"layer_types": (), "nope_layers": variant.model.positions.nope_layers} if layers == 1 else {}
    model = with_fields(spec, num_hidden_layers=layers, **kinds)
    own = replace(variant.plan, layout=plan.layout, batch=plan.batch)
    if own.lora is not None and plan.lora is not None:
        own = replace(own, lora=replace(own.lora, rank=plan.lora.rank))
    spread = plan.layout.tp if variant.spread > 1 else 1
    return trace(replace(variant, model=model, plan=own, atoms=(), sums=(), rules=(), spread=spread))


def told(unit: Unit, numbers: dict[str, int]) -> dict[str, Any]:
    """All that is in a unit, sizes as numbers."""

    def sizes(dims: tuple[Any, ...]) -> list[int]:
        return [size_of(dim, numbers) for dim in dims]

    def op(one: Op) -> tuple[Any, ...]:
        size = size_of(one.symbols, numbers) if one.symbols else 0
        kept = (one.kind, one.name, one.allocates, one.frees, one.reads, one.writes, one.weight, one.axis)
        return *kept, size, sizes(one.dims), sizes(one.read), sizes(one.written)

    found = {mark: vars(unit)[mark] for mark in ("input", "output", "gradient_in", "gradient_out", "saved")}
    return found | {
        "weights": [(w.name, sizes(w.symbols), w.dtype, w.trained) for w in unit.weights],
        "tensors": [(prod(sizes(t.symbols)), t.dtype, t.category) for t in unit.tensors],
        "gradients": unit.weight_gradients,
        **{name: [*map(op, vars(unit)[name])] for name in ("forward", "forward_plain", "backward")},
    }


@pytest.mark.matrix(12)
@pytest.mark.parametrize("case", CASES)
def test_symbols_come_to_what_a_trace_with_own_numbers_sees(case: str) -> None:
    name, plan = CASES[case]
    spec = load_spec(name)
    for unit in ("embedding", spec.num_hidden_layers - 1, "head"):
        made = chosen(spec, plan, RankKind(plan.layout), unit)
        numbers = {**made.numbers, "b": plan.batch.micro_batch_size, "s": plan.batch.seq_len}
        symbolic, own = told(trace_once(made.variant), numbers), told(with_own_numbers(made, spec, plan), numbers)
        for what, each in own.items():
            assert symbolic[what] == each, f"{what} of {unit}"


def test_primes_are_primes_and_distinct() -> None:
    odd = [number // (number & -number) for number in (*PRIMES.values(), *GROWING.values())]
    numbers = [*odd, lora.RANK, tp.RANKS, tp.FEW, ODD_ROWS, -(-ODD_ROWS * GROWING["s"] // tp.RANKS)]
    assert len(set(numbers)) == len(numbers)
    assert all(number % divisor for number in numbers for divisor in range(2, int(number**0.5) + 1))


def test_a_sum_that_divides_another_is_looked_for_later() -> None:
    """As the scales of a latent's matrix, in a byte each, divide those of an expert's."""
    variant = next(v for v in ship.ordinary() if v.plan.lora is not None and v.plan.lora.float8)
    read = Symbols.of(variant, {"scales of kv_a": 13038, "scales of gate": 18 * 13038})
    assert [read(4 * 18 * 13038), read(4 * 13038)] == ["4*scales of gate", "4*scales of kv_a"]


def test_sizes_are_read_as_products() -> None:
    read = Symbols((*PRIMES.items(), *GROWING.items()))
    d, e, b, s = PRIMES["d"], PRIMES["e"], GROWING["b"], GROWING["s"]
    heads = PRIMES["K"] * PRIMES["G"]
    assert [read(size) for size in (0, 3, d, 2 * d * heads * e, e // 2, 6 * PRIMES["p"], d // 64)] == [
        0,
        3,
        "d",
        "2*G*K*d*e",
        "e/2",
        "6*p",
        "d/64",
    ]
    assert read.shape((b * s * d, b, 2 * s)) == ("b*s", "d", "b", "s", 2)
    with pytest.raises(ValueError, match="of the symbols"):
        read(d + heads)
    with pytest.raises(ValueError, match="grows with the"):
        read.shape((s * s,))


def test_a_rank_of_a_cut_model_has_its_own_numbers() -> None:
    """The last of eight has fewer ids; of sixteen two share a key head."""
    spec = replace(load_spec("Llama-3-8B"), vocab_size=128_257)
    for ranks, wanted in ((8, {"V": 16_026, "K": 1, "G": 4, "f": 1_792}), (16, {"V": 8_002, "K": 8, "G": 2, "f": 896})):
        plan = Plan(Layout(tp=ranks), Batch(1, 1, 100), Shard(), sequence_parallel=True)
        numbers = chosen(spec, plan, RankKind(plan.layout, ranks - 1), 0).numbers
        assert {symbol: numbers[symbol] for symbol in wanted} == wanted
        assert (numbers["t"], numbers["n"]) == (ranks, -(-100 // ranks))
