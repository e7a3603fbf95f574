"""Drift of models that run transformers' own modules: their blocks, stems and tails are traced as they are."""

from __future__ import annotations

from itertools import product

import pytest

from shardwise.prove.drift import drift
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Plan, Precision, Remat, Shard
from tests.models.hf_models import CONFIGS, spec_of

BF16 = Precision("bf16")
SHARDED, REPLICATED = Layout(dp_shard=8), Layout(dp_replicate=8)
PLANS = {
    "zero3, bf16, selective recompute, accumulation": Plan(
        SHARDED, Batch(2, 3, 32, 24), Shard("zero3"), BF16, Remat("selective")
    ),
    "ddp, bf16, full recompute": Plan(REPLICATED, Batch(2, 1, 32, 24), Shard(), BF16, Remat("full")),
    "ddp, bf16": Plan(REPLICATED, Batch(2, 1, 32, 24), Shard(), BF16),
    "zero1, fp32": Plan(SHARDED, Batch(2, 1, 32, 64), Shard("zero1")),
    "zero3, bf16, frozen": Plan(SHARDED, Batch(2, 1, 32, 24), Shard("zero3"), BF16, frozen=("embed.*", "layers.0.*")),
    "zero3, bf16, adapters": Plan(SHARDED, Batch(2, 1, 32, 24), Shard("zero3"), BF16, lora=Lora(4, 8.0)),
    "ddp, adapters on 4 bits": Plan(REPLICATED, Batch(2, 1, 32, 24), Shard(), BF16, lora=Lora(4, 8.0, nf4=True)),
}


@pytest.mark.matrix(10)
@pytest.mark.parametrize(("kind", "plan"), list(product(("gpt2", "gpt_neox", "cohere2"), PLANS)))
def test_plans(kind: str, plan: str) -> None:
    chosen = PLANS[plan]
    assert not drift(spec_of(kind), chosen, 7).differences()


@pytest.mark.matrix(3)
@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind not in ("gpt2", "gpt_neox", "cohere2")])
def test_every_kind(kind: str) -> None:
    plan = PLANS["zero3, bf16, selective recompute, accumulation"]
    assert not drift(spec_of(kind), plan, 0).differences()


def test_tables_of_which_every_block_makes_its_own_live_as_long_as_forward() -> None:
    """glm4 saves what it makes of its tables, and not the tables."""
    assert not drift(spec_of("glm4"), PLANS["ddp, bf16"], 7).differences()


@pytest.mark.matrix(3)
@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind not in ("gpt2", "gpt_neox", "cohere2")])
def test_every_kind_without_recomputation(kind: str) -> None:
    assert not drift(spec_of(kind), PLANS["zero1, fp32"], 0).differences()
