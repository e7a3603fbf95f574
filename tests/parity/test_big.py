"""Parity in bf16 of every strategy, way of recomputing and accumulation on four ranks, not a covering subset."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.models.config import ModelSpec
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from tests.parity.cases import BF16, FP32, STRATEGIES, TIED, UNTIED, grid


@pytest.mark.big
@pytest.mark.parametrize("spec", [UNTIED, TIED], ids=lambda spec: spec.name)
@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "hsdp"])
def test_bf16(ranks: RankPool, strategy: str, reduce: str, spec: ModelSpec) -> None:
    plans = grid(strategy, 4, replace(BF16, reduce=reduce))  # type: ignore[type-var]
    for measured, of in zip(parity.prove(ranks, spec, plans, steps=1), plans, strict=True):
        assert measured.turn.error <= 1e-3, f"{measured}\nunder {of}"


@pytest.mark.big
@pytest.mark.parametrize("spec", [UNTIED, TIED], ids=lambda spec: spec.name)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "hsdp"])
def test_fp32(ranks: RankPool, strategy: str, spec: ModelSpec) -> None:
    plans = grid(strategy, 4, FP32)
    for measured, of in zip(parity.prove(ranks, spec, plans, steps=1), plans, strict=True):
        assert measured.loss.error <= 1e-6 and measured.gradient.error <= 1e-5, f"{measured}\nunder {of}"
