"""Parity of what the other files prove for covering subsets: every strategy, way of recomputing and accumulation."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from shardwise.models.config import ModelSpec
from shardwise.prove import parity
from shardwise.prove.distance import directions
from shardwise.prove.pool import RankPool
from shardwise.spec.plan import Lora, Remat
from tests.parity import test_frozen, test_lora
from tests.parity.cases import BF16, FP32, FP64, STRATEGIES, TIED, UNTIED, grid, plan
from tests.parity.test_fp64 import holds, split


@pytest.mark.big
@pytest.mark.parametrize("spec", [UNTIED, TIED], ids=lambda spec: spec.name)
@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "hsdp"])
def test_bf16(ranks: RankPool, strategy: str, reduce: str, spec: ModelSpec) -> None:
    """Gradients point where those of float64 do; where sums cancel, as in the bias of keys, which without rotation
    would have no gradient at all, no less exactly than twice the error of a plain loop in bf16."""
    plans = grid(strategy, 4, replace(BF16, reduce=reduce))  # type: ignore[type-var]
    job = parity.job_of(spec, plans[0], 1)
    exact = parity.plain(replace(job, compute="fp64", weights="fp64")).gradients
    allowed = {name: max(1e-3, 2 * error) for name, error in directions(exact, parity.plain(job).gradients).items()}
    for traces in ranks.run(parity.train_on_rank, spec, plans, 1, world=4):
        for trace, of in zip(traces, plans, strict=True):
            errors = directions(exact, trace.gradients)
            assert all(error <= allowed[name] for name, error in errors.items()), f"{errors}\nunder {of}"


@pytest.mark.big
@pytest.mark.parametrize("spec", [UNTIED, TIED], ids=lambda spec: spec.name)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "hsdp"])
def test_fp32(ranks: RankPool, strategy: str, spec: ModelSpec) -> None:
    plans = grid(strategy, 4, FP32)
    for measured, of in zip(parity.prove(ranks, spec, plans, steps=1), plans, strict=True):
        assert measured.loss.error <= 1e-6 and measured.gradient.error <= 1e-5, f"{measured}\nunder {of}"


@pytest.mark.big
@pytest.mark.parametrize("strategy", [*STRATEGIES, "hsdp"])
def test_fp64(ranks: RankPool, strategy: str) -> None:
    for world in (4,) if strategy == "hsdp" else (2, 4):
        plans = grid(strategy, world, FP64)
        holds(parity.prove(ranks, UNTIED, plans), plans)


@pytest.mark.big
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp64_of_tied_embeddings_biases_and_scaled_rotation(ranks: RankPool, strategy: str, world: int) -> None:
    plans = [plan(strategy, world, FP64, Remat("full"), 4)]
    holds(parity.prove(ranks, TIED, plans), plans)


@pytest.mark.big
@pytest.mark.parametrize("world", [1, 2, 4])
def test_fp64_of_every_split_and_every_chunk_of_the_loss(ranks: RankPool, world: int) -> None:
    sharded = [] if world == 1 else [("zero3", 1)]
    for strategy, bucket in (("ddp", 1), ("ddp", 2**25), *sharded):
        settings = product((1, 2, 8), (5, 24, 10_000))
        plans = [split(strategy, world, bucket, m, chunk) for m, chunk in settings]
        holds(parity.prove(ranks, UNTIED, plans), plans)


@pytest.mark.big
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp64_of_adapters_and_frozen_weights_with_accumulation(ranks: RankPool, strategy: str) -> None:
    for remat in ("none", "selective", "full"):
        for targets in ((), ("q", "v"), ("down",)):
            adapted = test_lora.lora_plan(strategy, 2, Lora(3, 6.0, targets), remat, 4)
            test_lora.holds(ranks, UNTIED, [adapted])
        for frozen in test_frozen.FROZEN.values():
            test_frozen.holds(ranks, UNTIED, [test_frozen.frozen_plan(strategy, 2, frozen, remat, 4)])
