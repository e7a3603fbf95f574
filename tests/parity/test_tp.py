"""Tensor and sequence parallelism in float64: loss, norm, every gradient of step 1 and the weights after two steps of
AdamW are those of one process (the tolerance is that of test_fp64.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.models.config import with_fields
from shardwise.prove.pool import RankPool
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Remat, Shard
from tests.parity import drawn
from tests.parity.cases import BF16, FP32, FP64, QWEN, ROWS, SEQ_LEN, UNTIED
from tests.parity.test_fp64 import holds

EVEN = replace(UNTIED, name="tiny-even", intermediate_size=28)
"""What two ranks divide; the vocabulary, 67, they do not."""
QWEN_EVEN = replace(QWEN, name="tiny-qwen-even", intermediate_size=28)


def plan(strategy: str, dp: int, tp: int, *, sequence: bool, remat: str = "none", accumulation: int = 1) -> Plan:
    """Of ``dp`` x ``tp`` ranks; sixteen rows a step however they are split."""
    sharded = strategy != "ddp"
    layout = Layout(dp_shard=dp, tp=tp) if sharded else Layout(dp_replicate=dp, tp=tp)
    batch = Batch(ROWS // accumulation // dp, accumulation, SEQ_LEN, loss_chunk_tokens=7)
    shard = Shard(strategy, bucket_bytes=4096)  # type: ignore[arg-type]
    return Plan(layout, batch, shard, FP64, Remat(remat), sequence_parallel=sequence)  # type: ignore[arg-type]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "whole"])
def test_two_ranks(ranks: RankPool, sequence: bool) -> None:
    plans = [plan("ddp", 1, 2, sequence=sequence)]
    holds(drawn.prove(ranks, EVEN, plans), plans)


@pytest.mark.prove
def test_beside_strategies(ranks: RankPool) -> None:
    """The models, the other strategies and degrees and all pairs of settings are in test_tp_pairwise.py."""
    plans = [
        plan(strategy, 2, 2, sequence=sequence, remat=remat, accumulation=accumulation)
        for strategy, sequence, remat, accumulation in (
            ("ddp", True, "full", 4),
            ("zero2", True, "selective", 1),
            ("zero3", False, "none", 4),
        )
    ]
    plans.append(replace(plans[1], shard=Shard("zero2", bucket_bytes=1)))  # every gradient is summed by itself
    holds(drawn.prove(ranks, EVEN, plans), plans)


@pytest.mark.prove
def test_tokens_that_the_ranks_do_not_divide(ranks: RankPool) -> None:
    """The last ones' are filled up while they are sent."""
    plans = [
        replace(plan("ddp", 1, tp, sequence=True, remat=remat), batch=Batch(1, 4, 11, loss_chunk_tokens=7))
        for tp, remat in ((2, "selective"), (4, "full"))
    ]
    holds(drawn.prove(ranks, EVEN, plans), plans)


@pytest.mark.prove
def test_fp32_and_bf16(ranks: RankPool) -> None:
    """Loss and first gradients, with the tolerances of test_fp32_bf16.py; more in test_tp_pairwise.py. Of weights of
    0.1: with those of 0.3 the plain loop itself, in bf16, is 1e-3 from the gradients in fp64."""
    spec = replace(EVEN, initializer_range=0.1)
    wide = [plan("ddp", 1, 2, sequence=True, remat="selective"), plan("zero3", 2, 2, sequence=False)]
    plans = [replace(of, precision=precision) for precision in (FP32, BF16) for of in wide]
    for found, of in zip(drawn.prove(ranks, spec, plans, steps=1), plans, strict=True):
        if of.precision == FP32:
            assert found.loss.error <= 1e-6 and found.gradient.error <= 1e-5, f"{found}\nunder {of}"
        else:
            assert found.turn.error <= 1e-3, f"{found}\nunder {of}"


@pytest.mark.prove
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_modules_in_types_of_their_own(ranks: RankPool, sequence: bool) -> None:
    """Layers in fp64 among others in fp32, biases too: loss and first gradients as the plain loop has them in fp32. Of
    weights of 0.1: with those of 0.3, what fp32 rounds of a key's bias, where gradients nearly cancel, is 1e-5."""
    spec = with_fields(EVEN, attention_bias=True, mlp_bias=True, initializer_range=0.1)
    wide = replace(FP32, modules=(("*.q", "fp64"), ("*.o", "fp64"), ("layers.1.mlp.*", "fp64")))
    plans = [
        replace(plan(*of, sequence=sequence, remat=remat), precision=wide)  # type: ignore[arg-type]
        for of, remat in ((("ddp", 1, 2), "selective"), (("ddp", 1, 4), "none"), (("zero3", 2, 2), "full"))
    ]
    for found, of in zip(drawn.prove(ranks, spec, plans, steps=1), plans, strict=True):
        assert found.loss.error <= 1e-6 and found.gradient.error <= 1e-5, f"{found}\nunder {of}"
