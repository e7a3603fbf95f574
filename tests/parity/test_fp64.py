"""In float64 a plan's training is the plain one's: loss, norm, first gradients, weights after five AdamW steps.

The tolerance, 1e-9 relative, is a million times the rounding of float64 and a hundred thousand times less than what the
mildest fault of the planted list changes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Remat, Shard
from tests.covering import pairwise
from tests.parity.cases import FP64, STRATEGIES, TIED, UNTIED, plan

TOLERANCE = 1e-9


def holds(found: list[parity.Parity], plans: list[Plan]) -> None:
    assert len(found) == len(plans) > 0
    for measured, of in zip(found, plans, strict=True):
        errors = [measured.loss, measured.norm, measured.gradient, measured.weight, measured.figure]
        assert all(error.error <= TOLERANCE for error in errors), f"{measured}\nunder {of}"
        assert not measured.apart, f"{measured.apart}\nunder {of}"


def two_by_two(strategy: str, world: int, *more: object) -> bool:
    return strategy != "hsdp" or world == 4


@pytest.mark.matrix(8)
@pytest.mark.parametrize(
    ("strategy", "world", "remat", "accumulation"),
    pairwise((*STRATEGIES, "hsdp"), (2, 4), ("none", "selective", "full"), (1, 4), legal=two_by_two),
)
def test_strategies(ranks: RankPool, strategy: str, world: int, remat: str, accumulation: int) -> None:
    plans = [plan(strategy, world, FP64, Remat(remat), accumulation)]  # type: ignore[arg-type]
    holds(parity.prove(ranks, UNTIED, plans), plans)


@pytest.mark.prove
def test_hybrid_of_every_sharded_strategy(ranks: RankPool) -> None:
    three = plan("hsdp", 4, FP64, accumulation=4)
    plans = [replace(three, shard=replace(three.shard, strategy=strategy)) for strategy in ("zero1", "zero2")]
    holds(parity.prove(ranks, UNTIED, plans), plans)


@pytest.mark.prove
def test_tied_embeddings_biases_and_scaled_rotation(ranks: RankPool) -> None:
    plans = [plan(s, w, FP64, Remat("full"), 2) for w, s in zip((2, 4, 2, 4), STRATEGIES, strict=True)]
    plans.append(plan("hsdp", 4, FP64))
    holds(parity.prove(ranks, TIED, plans), plans)


@pytest.mark.prove
def test_weights_kept_after_forward_by_some_or_all(ranks: RankPool) -> None:
    three, hybrid = (plan(name, 4, FP64, accumulation=4) for name in ("zero3", "hsdp"))
    plans = [replace(three, shard=replace(three.shard, reshard_after_forward=kept)) for kept in (False, 2)]
    plans += [replace(three, shard=replace(three.shard, backward_prefetch=ahead)) for ahead in (0, 2)]
    plans += [replace(each, shard=replace(each.shard, sync_each_batch=False)) for each in (three, hybrid)]
    holds(parity.prove(ranks, UNTIED, plans), plans)


@pytest.mark.prove
def test_every_second_block_recomputed(ranks: RankPool) -> None:
    plans = [plan(s, 2, FP64, Remat(mode, every=2)) for s in ("ddp", "zero3") for mode in ("selective", "full")]  # type: ignore[arg-type]
    holds(parity.prove(ranks, UNTIED, plans), plans)


@pytest.mark.prove
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_same_batch_split_in_any_way(ranks: RankPool, world: int) -> None:
    """Eight rows a rank as 1 x 8, 2 x 4 and 8 x 1, in one bucket or many, all against one loop over all rows."""
    plans = [
        split(strategy, world, bucket, m, chunk)
        for strategy, bucket, m, chunk in (
            ("ddp", 1, 1, 10_000),
            ("ddp", 2**25, 2, 5),
            ("ddp", 1, 8, 24),
            ("zero3", 1, 1, 24),
            ("zero3", 1, 2, 5),
            ("zero3", 1, 8, 10_000),
        )
        if world > 1 or strategy == "ddp"
    ]
    holds(parity.prove(ranks, UNTIED, plans), plans)


def split(strategy: str, world: int, bucket: int, m: int, chunk: int) -> Plan:
    """32 rows a step over all ranks, in ``m`` micro-batches."""
    return Plan(
        layout=Layout(dp_replicate=world) if strategy == "ddp" else Layout(dp_shard=world),
        batch=Batch(32 // world // m, m, 12, loss_chunk_tokens=chunk),
        shard=Shard(strategy, bucket_bytes=bucket),  # type: ignore[arg-type]
        precision=FP64,
    )
