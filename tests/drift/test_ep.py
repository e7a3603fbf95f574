"""Mixtures of experts and expert parallelism: what ranks send, hold and save, to the byte, beside every setting that
they meet; and what a layer sends and multiplies, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.prove.drift import drift
from shardwise.spec.plan import Precision
from tests.parity.mixtures import CASES, Case

BF16 = Precision(compute="bf16")


@pytest.mark.matrix(6)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_setting_that_they_meet(case: Case) -> None:
    world, plan = case.plan.layout.world, replace(case.plan, precision=BF16)
    for rank in sorted({0, world // 2, world - 1}):
        assert drift(case.spec, plan, rank).differences() == []
