"""Drift of models of other families than Llama: norms around and inside attention, two sorts of tables and of layers,
capped logits, multipliers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.models.config import model_spec
from shardwise.models.families import FAMILIES, FULL, SLIDING
from shardwise.prove.drift import PEAK_FROM_BYTES, drift
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Plan, Precision, Remat, Shard
from shardwise.techniques import precision
from tests.models.families import spec_of

BF16 = Precision("bf16")
PLANS = {
    "zero3, bf16, selective recompute, accumulation": Plan(
        Layout(dp_shard=8), Batch(2, 3, 32, 24), Shard("zero3"), BF16, Remat("selective")
    ),
    "ddp, bf16, full recompute": Plan(Layout(dp_replicate=8), Batch(2, 1, 32, 24), Shard(), BF16, Remat("full")),
    "zero1, fp32": Plan(Layout(dp_shard=8), Batch(2, 1, 32, 64), Shard("zero1")),
}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3"])
def test_plans(family: str, plan: str) -> None:
    spec = spec_of(family)
    assert not drift(spec, PLANS[plan], 7).differences()


@pytest.mark.matrix(4)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("llama", "gemma3_text", "qwen3")])
def test_every_family(family: str) -> None:
    spec, plan = spec_of(family), PLANS["zero3, bf16, selective recompute, accumulation"]
    assert not drift(spec, plan, 0).differences()


@pytest.mark.matrix
@pytest.mark.parametrize("plan", [*PLANS, "tp"])
def test_blocks_of_one_model_may_differ_in_width(plan: str) -> None:
    """The first two are wider than the others: each is bound to numbers of its own."""
    spec = model_spec("uneven", 600, 48, 160, 12, 6, 2, 8, intermediate_sizes=(160,) * 2 + (96,) * 10)
    cut = Plan(Layout(dp_replicate=2, tp=2), Batch(2, 1, 32, 24), sequence_parallel=True, lora=Lora(4, 8.0))
    made = drift(spec, PLANS.get(plan, cut), 1)
    assert not made.differences()
    assert made.predicted.state != drift(replace(spec, intermediate_sizes=()), PLANS.get(plan, cut), 1).predicted.state


TYPES = Precision("bf16", modules=(("*norm", "fp32"), ("*.q", "fp32"), ("*.down", "fp32"), ("layers.1.*", "fp32")))


@pytest.mark.matrix(8)
@pytest.mark.parametrize("family", FAMILIES)
def test_types_by_module_are_right_or_refused(family: str) -> None:
    """The plan knows how norms before attention and MLP change their type, and linear layers, with biases too; and no
    other norms."""
    spec, plan = spec_of(family), Plan(Layout(dp_shard=8), Batch(2, 1, 32, 24), Shard("zero3"), TYPES)
    if family in ("llama", "mistral", "qwen2", "phi3", "mixtral", "qwen2_moe"):
        assert not precision.check(spec, plan, parse_cluster("8xH100"))
        assert not drift(spec, plan).differences()
        assert not drift(spec, replace(plan, layout=Layout(dp_replicate=8), shard=Shard())).differences()
    else:
        assert [problem.code for problem in precision.check(spec, plan, parse_cluster("8xH100"))] == ["PLAN016"]


@pytest.mark.parametrize("number", [BF16, Precision()])
def test_peak_with_capped_logits(number: Precision) -> None:
    """More than a gigabyte, most of it logits: those of a chunk are kept until their gradient is made."""
    spec = model_spec(
        "capped",
        64_000,
        256,
        512,
        2,
        4,
        2,
        64,
        tie_word_embeddings=True,
        final_soft_cap=30.0,
        attention_soft_cap=50.0,
        norm_placement="both",
        norm_plus_one=True,
        activation="gelu_tanh",
        sliding_window=64,
        layer_types=(SLIDING, FULL),
    )
    plan = Plan(Layout(dp_shard=8), Batch(4, 1, 1024, 4096), Shard("zero3"), number)
    found = drift(spec, plan, 0)
    assert not found.differences()
    assert found.measured.peak_bytes > PEAK_FROM_BYTES and abs(found.peak_error) < 0.03
