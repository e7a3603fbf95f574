"""Recomputation by a budget changes no number, whatever it saves."""

from __future__ import annotations

import pytest

from shardwise.models.config import ModelSpec
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.spec.layout import Layout
from tests.drift.test_budget import spread
from tests.parity.cases import FP64, UNTIED
from tests.parity.cases import plan as dense
from tests.parity.mixers import DEEPSEEK, NEXT, plan
from tests.parity.test_fp64 import holds


def test_dense_blocks(ranks: RankPool) -> None:
    plans = [spread(UNTIED, dense("zero3", 2, FP64, accumulation=2))]
    holds(parity.prove(ranks, UNTIED, plans), plans)


@pytest.mark.prove
@pytest.mark.parametrize("spec", [DEEPSEEK, NEXT], ids=["latents, experts", "delta nets, experts"])
def test_kinds_of_blocks(ranks: RankPool, spec: ModelSpec) -> None:
    plans = [spread(spec, plan(Layout(dp_shard=2), "zero3")), spread(spec, plan(Layout(dp_replicate=2)))]
    holds(parity.prove(ranks, spec, plans), plans)
