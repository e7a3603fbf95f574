"""Preference optimisation: what a plan sends, holds and saves is what was predicted, and what it costs more."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from shardwise.models.config import model_spec
from shardwise.planner.price import price
from shardwise.prove.drift import PEAK_FROM_BYTES, drift
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.methods import METHODS
from shardwise.spec.plan import Batch, Lora, Plan, Precision, Shard
from shardwise.spec.records import MethodSpec
from tests.drift.test_drift import PRECISIONS, REMATS, SHARDINGS, SPEC, check, layout, plan_of


@pytest.mark.matrix(3)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_every_strategy(sharding: str) -> None:
    """One chunk of tokens and several; adapters and none; types by turns."""
    turn = SHARDINGS.index(sharding)
    for accumulation, chunk, lora in ((2, 40, None), (1, 64, Lora(4, 8.0))):
        precision = PRECISIONS[("fp32", "bf16", "bf16 weights")[(turn + accumulation) % 3]]
        plan = plan_of(sharding, 8, batch=Batch(2, accumulation, 32, chunk), precision=precision, loss="dpo")
        check(replace(plan, lora=lora), ranks=(7,))


@pytest.mark.big
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 weights"])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_every_strategy_and_type(sharding: str, precision: str) -> None:
    for accumulation, chunk, lora in ((1, 64, None), (3, 40, None), (1, 40, Lora(4, 8.0))):
        batch = Batch(2, accumulation, 32, chunk)
        plan = plan_of(sharding, 8, batch=batch, precision=PRECISIONS[precision], loss="dpo")
        check(replace(plan, lora=lora), ranks=(7,))


@pytest.mark.parametrize("method", [spec for spec in METHODS.values() if spec.pairs], ids=lambda spec: spec.name)
def test_every_loss_of_pairs(method: MethodSpec) -> None:
    """Where rows are cut what is summed over an answer's tokens, and how many these are, is summed over ranks too."""
    assert method.row_sums == (4 if method.counted else 2)
    for sharding, axes in (("zero3", {}), ("ddp", {"cp": 2}), ("zero1", {"tp": 2})):
        plan = plan_of(sharding, 2, batch=Batch(2, 2, 32, 40), loss=method.loss)
        check(replace(plan, layout=replace(plan.layout, **axes)), ranks=(0,))


def test_tied_and_recomputed() -> None:
    spec = replace(SPEC, tie_word_embeddings=True, final_soft_cap=4.0)
    for remat in ("selective", "full"):
        check(plan_of("zero3", 8, batch=Batch(2, 3, 32, 40), remat=REMATS[remat], loss="dpo"), spec)


@pytest.mark.matrix
@pytest.mark.parametrize("lora", [None, Lora(16, 32.0)], ids=["full", "lora"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_the_peak_of_a_large_model(strategy: str, lora: Lora | None) -> None:
    """Above 1 GiB, where the peak too is among the differences when it is not within 3 %."""
    spec = model_spec("large", 32_000, 2048, 5632, 3, 16, 8, 128)
    plan = plan_of(strategy, 8, batch=Batch(2, 1, 2048, 1024), precision=Precision("bf16"), loss="dpo")
    plan = replace(plan, lora=lora, shard=Shard(strategy))  # type: ignore[arg-type]
    found = drift(spec, plan, 0)
    assert found.measured.peak_bytes >= PEAK_FROM_BYTES and not found.differences()


def test_what_it_costs_more() -> None:
    """The output layer is multiplied once more in each micro-batch; with the loss are sent eight numbers instead of
    one, which makes a larger message of it; memory is nearly the same."""
    batch = Batch(2, 3, 32, 40)
    plans = [Plan(layout("zero3", 8), batch, Shard("zero3"), PRECISIONS["bf16"], loss=loss) for loss in LOSSES]
    usual, pairs = (price(SPEC, plan, parse_cluster("8xH100")).estimate for plan in plans)
    tokens = 8 * 3 * 2 * 32
    assert pairs.flops_per_step - usual.flops_per_step == 2 * SPEC.vocab_size * SPEC.hidden_size * tokens
    more = Counter({(each.category, each.kind): each.bytes for each in pairs.traffic})
    more.subtract({(each.category, each.kind): each.bytes for each in usual.traffic})
    assert +more == {("counts", "all_reduce"): 16 + 8 * 8}, "what a step reports"
    assert -more == {("control", "all_reduce"): 16 + 8}
    assert 0 <= pairs.peak_bytes - usual.peak_bytes <= 2 * 32 * (8 * 3 + 4)


LOSSES = ("cross_entropy", "dpo")
