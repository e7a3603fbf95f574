"""In fp32 the loss and the first gradients, in bf16 the directions of the gradients.

fp32: 1e-6 and 1e-5 relative are a few roundings (6e-8) summed in another order over a few hundred terms. Weights after
Adam are not compared, for a gradient near zero may change its sign. bf16 has 8 bits: single gradients differ by 1e-2,
their direction hardly: a cosine of at least 0.999 with the plain loop of the same types.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.spec.plan import Plan, Precision, Remat
from tests.parity.cases import BF16, FP32, TIED, UNTIED, plan


def covering(precision: object) -> list[Plan]:
    """Each strategy, way of recomputing and accumulation at least once, most pairs too."""
    return [
        plan("ddp", 2, precision, Remat("none"), 4),  # type: ignore[arg-type]
        plan("ddp", 4, precision, Remat("selective"), 1),  # type: ignore[arg-type]
        plan("zero1", 2, precision, Remat("full"), 4),  # type: ignore[arg-type]
        plan("zero1", 4, precision, Remat("none"), 1),  # type: ignore[arg-type]
        plan("zero2", 4, precision, Remat("selective"), 4),  # type: ignore[arg-type]
        plan("zero2", 2, precision, Remat("full"), 1),  # type: ignore[arg-type]
        plan("zero3", 4, precision, Remat("full"), 4),  # type: ignore[arg-type]
        plan("zero3", 2, precision, Remat("none"), 1),  # type: ignore[arg-type]
        plan("hsdp", 4, precision, Remat("selective"), 1),  # type: ignore[arg-type]
        plan("hsdp", 4, precision, Remat("none"), 4),  # type: ignore[arg-type]
    ]


@pytest.mark.prove
def test_fp32(ranks: RankPool) -> None:
    for spec in (UNTIED, TIED):
        plans = covering(FP32)
        for measured, of in zip(parity.prove(ranks, spec, plans, steps=1), plans, strict=True):
            assert measured.loss.error <= 1e-6 and measured.gradient.error <= 1e-5, f"{measured}\nunder {of}"


@pytest.mark.prove
def test_bf16_compute_with_fp32_weights(ranks: RankPool) -> None:
    """Gradients reduced in fp32."""
    plans = covering(BF16)
    for measured, of in zip(parity.prove(ranks, UNTIED, plans, steps=1), plans, strict=True):
        assert measured.turn.error <= 1e-3, f"{measured}\nunder {of}"


def test_fp16_whose_loss_is_scaled(ranks: RankPool) -> None:
    """Gradients are told without the scale: 1e-2 of the largest element is a few of fp16's roundings (5e-4)."""
    plans = [plan("zero2", 2, Precision("fp16"), Remat("none"), 4)]
    [measured] = parity.prove(ranks, UNTIED, plans, steps=1)
    assert measured.gradient.error <= 1e-2 and measured.norm.error <= 1e-2, measured


@pytest.mark.prove
def test_bf16_reduction_and_bf16_weights(ranks: RankPool) -> None:
    narrow = [
        plan(strategy, world, replace(BF16, reduce="bf16", weights=weights))
        for strategy, world in (("ddp", 2), ("ddp", 4), ("zero2", 2), ("zero3", 4), ("hsdp", 4))
        for weights in ("fp32", "bf16")
    ]
    for measured, of in zip(parity.prove(ranks, UNTIED, narrow, steps=1), narrow, strict=True):
        assert measured.turn.error <= 1e-3, f"{measured}\nunder {of}"
