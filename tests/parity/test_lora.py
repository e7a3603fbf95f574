"""With adapters a plan's training is the plain loop's, in which each adapted weight is one matrix W + scale B A, in
float64 (tolerance: tests/parity/test_fp64.py); and every weight of the model stays, to the bit, what it was.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardwise.models import init
from shardwise.models.config import ModelSpec, parameter_shapes, with_fields
from shardwise.models.roles import is_adapter, is_linear
from shardwise.prove import parity
from shardwise.prove.distance import directions
from shardwise.prove.pool import RankPool
from shardwise.spec.plan import Lora, Plan, Remat
from shardwise.techniques.dtypes import torch_dtype
from shardwise.techniques.nf4.fourbit import dequantise, quantise
from tests.covering import pairwise
from tests.parity.cases import BF16, FP64, STRATEGIES, TIED, UNTIED, plan

WIDE = with_fields(UNTIED, hidden_size=64, intermediate_size=128, num_attention_heads=8, head_dim=8)
TOLERANCE = 1e-9
STEPS = 4
"""B is zero at first, so A has its first gradient in the second step and changes what the third computes."""


def lora_plan(strategy: str, world: int, lora: Lora, remat: str, accumulation: int) -> Plan:
    return replace(plan(strategy, world, FP64, Remat(remat), accumulation), lora=lora)  # type: ignore[arg-type]


def holds(ranks: RankPool, spec: ModelSpec, plans: list[Plan]) -> None:
    """All plans have one size."""
    answers = ranks.run(parity.train_on_rank, spec, plans, STEPS, world=plans[0].layout.world)
    for place, of in enumerate(plans):
        traces = [mine[place] for mine in answers]
        found = parity.compare(parity.plain(parity.job_of(spec, of, STEPS)), traces)
        errors = [found.loss, found.norm, found.gradient, found.weight]
        assert all(error.error <= TOLERANCE for error in errors), f"{found}\nunder {of}"
        for trace in traces:
            assert trace.gradients and all(is_adapter(name) for name in trace.gradients)
            for name, shape in parameter_shapes(spec).items():
                assert torch.equal(trace.weights[name].double(), first(name, shape, spec, of)), name
            changed = [name for name, value in trace.weights.items() if name.endswith("lora_b.weight") and value.any()]
            assert len(changed) * 2 == sum(is_adapter(name) and name.endswith(".weight") for name in trace.weights)


def first(name: str, shape: tuple[int, ...], spec: ModelSpec, of: Plan) -> torch.Tensor:
    """What the weight began as, in the type that it is kept in (test_nf4.py is about the 4 bits)."""
    value = init.fill(name, shape, tuple(slice(0, size) for size in shape), 0, spec)
    assert of.lora is not None
    if of.lora.nf4 and is_linear(name):
        return dequantise(*quantise(value), torch.float64)
    return value.to(torch_dtype(of.lora.frozen)).double()


TARGETS: dict[str, tuple[str, ...]] = {"all-linear": (), "q and v": ("q", "v"), "down": ("down",)}
CASES = pairwise(TARGETS, STRATEGIES, ("none", "selective", "full"), (1, 2))


@pytest.mark.matrix
@pytest.mark.parametrize("targets", TARGETS)
def test_every_strategy(ranks: RankPool, targets: str) -> None:
    lora = Lora(3, 6.0, TARGETS[targets])
    holds(ranks, UNTIED, [lora_plan(s, 2, lora, remat, m) for of, s, remat, m in CASES if of == targets])


@pytest.mark.prove
def test_frozen_weights_in_bf16_and_in_four_bits(ranks: RankPool) -> None:
    """Computed with in float64, so that the base's rounding is the same everywhere."""
    settings = (("ddp", "none", 2), ("zero3", "full", 1), ("zero3", "selective", 2))
    for spec, lora in (
        (UNTIED, Lora(3, 6.0, frozen="bf16")),
        (WIDE, Lora(3, 6.0, ("q", "down"), frozen="bf16", nf4=True)),
    ):
        holds(ranks, spec, [lora_plan(s, 2, lora, remat, m) for s, remat, m in settings])


@pytest.mark.prove
def test_magnitudes(ranks: RankPool) -> None:
    """DoRA, with and without biases, above frozen weights of every kind."""
    biased = with_fields(UNTIED, attention_bias=True)
    cases = (
        (UNTIED, Lora(3, 6.0, dora=True)),
        (biased, Lora(3, 6.0, ("q", "v", "down"), frozen="bf16", dora=True)),
        (WIDE, Lora(3, 6.0, ("k", "o", "up"), nf4=True, dora=True)),
    )
    for spec, lora in cases:
        settings = (("ddp", "none", 2), ("zero3", "selective", 1), ("zero3", "full", 2))
        holds(ranks, spec, [lora_plan(s, 2, lora, remat, m) for s, remat, m in settings])


@pytest.mark.big
def test_hybrid_in_four_bits(ranks: RankPool) -> None:
    holds(ranks, WIDE, [lora_plan("hsdp", 4, Lora(2, 5.0, nf4=True), "full", 2)])


@pytest.mark.big
def test_hybrid_tied_and_rank_stabilised(ranks: RankPool) -> None:
    lora = Lora(2, 5.0, rslora=True)
    holds(ranks, TIED, [lora_plan("hsdp", 4, lora, "full", 2), lora_plan("zero3", 4, lora, "none", 1)])


@pytest.mark.prove
def test_magnitudes_begin_as_the_model_came(ranks: RankPool) -> None:
    """In bf16 too, where a sharded magnitude is gathered rounded: B is zero, so the first loss is LoRA's to the bit.
    The frozen weights are kept as they are computed with, which is what ``lora.frozen: auto`` does."""
    for strategy in ("ddp", "zero3"):
        loras = (Lora(3, 6.0, frozen="bf16", dora=dora) for dora in (False, True))
        plans = [replace(plan(strategy, 2, BF16), lora=lora) for lora in loras]
        for plain, sized in ranks.run(parity.train_on_rank, UNTIED, plans, 1, world=2):
            assert plain.losses == sized.losses


@pytest.mark.prove
def test_bf16(ranks: RankPool) -> None:
    """Adapters apart and in one matrix round differently in bf16, each product by 2^-9: losses agree to 5e-3, and the
    gradients of B point the same way (cosine 0.99; A's are zero in the first step)."""
    plans = [replace(plan(strategy, 2, BF16), lora=Lora(3, 6.0)) for strategy in ("ddp", "zero3")]
    answers = ranks.run(parity.train_on_rank, UNTIED, plans, STEPS, world=2)
    for place, of in enumerate(plans):
        right = parity.plain(parity.job_of(UNTIED, of, STEPS))
        for found in (mine[place] for mine in answers):
            assert all(abs(a / b - 1) < 5e-3 for a, b in zip(found.losses, right.losses, strict=True))
            angles = directions(right.gradients, found.gradients)
            assert max(angle for name, angle in angles.items() if name.endswith("lora_b.weight")) < 1e-2
