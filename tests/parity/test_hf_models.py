"""In float64 a model of transformers' own modules is trained as the plain loop trains it: one with learnt positions and
turned weights, one with blocks in parallel and rotation, and adapters on both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.spec.plan import Lora, Remat
from tests.models.hf_models import spec_of
from tests.parity.cases import FP64, plan
from tests.parity.test_fp64 import holds
from tests.parity.test_lora import holds as adapters_hold


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_full(ranks: RankPool, kind: str) -> None:
    spec = replace(spec_of(kind), initializer_range=0.3)
    plans = [plan("ddp", 2, FP64, Remat("full"), 4), plan("zero3", 2, FP64, Remat("selective"), 4)]
    holds(parity.prove(ranks, spec, plans), plans)


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_adapters(ranks: RankPool, kind: str) -> None:
    spec = replace(spec_of(kind), initializer_range=0.3)
    of = replace(plan("zero3", 2, FP64, Remat("full"), 4), lora=Lora(2, 4.0))
    adapters_hold(ranks, spec, [of])
