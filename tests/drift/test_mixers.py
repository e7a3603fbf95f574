"""Plans of models with latent attention, or gated delta nets, say what is sent, held and saved, to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.prove.drift import drift
from shardwise.spec.plan import Precision
from tests.parity.mixers import CASES, case


@pytest.mark.matrix(8)
@pytest.mark.parametrize("name", CASES)
def test_drift(name: str) -> None:
    """In fp32 and in bf16 by turns."""
    spec, of = case(name)
    dtype = ("fp32", "bf16")[[*CASES].index(name) % 2]
    of = replace(of, precision=Precision(dtype))  # type: ignore[arg-type]
    of = of if of.lora is None else replace(of, lora=replace(of.lora, frozen=dtype))  # type: ignore[arg-type]
    of = replace(of, expert_imbalance=1.0) if of.layout.ep > 1 else of
    for rank in {0, of.layout.world - 1}:
        assert not drift(spec, of, rank).differences()
