"""Peaks of real steps, by torch's own records of what it allocates, beside what plans say. A fake world cannot stand
for this: autograd adds gradients in place on real tensors, and never under a mode that watches them.

Not here, since gloo's threads hold copies of their own at the peak of most steps: tensor parallelism (1 MiB of 95), and
gradients that are reduced in every micro-batch (3 MiB of 170).
"""

from __future__ import annotations

import pytest
import torch

from shardwise import techniques
from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed.meshes import meshes
from shardwise.models.config import model_spec
from shardwise.planner.schedule import folded, schedule
from shardwise.planner.sheets import sheet_of
from shardwise.planner.spans import fold
from shardwise.prove.pool import RankPool
from shardwise.runtime.build import build
from shardwise.runtime.metrics.measure import Meter
from shardwise.runtime.step import step
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Plan, Precision, Remat, Shard
from shardwise.spec.recipe import OptimSection, Recipe
from tests.runtime.rank_work import rules_of

SPEC = model_spec("real-steps", 2048, 256, 704, 6, 8, 4, 32)
ADAPTERS = Lora(rank=8, alpha=16.0)
CASES = {
    "one rank": Plan(Layout(), Batch(4, 1, 256, 512)),
    "one rank, recomputed, two micro-batches": Plan(Layout(), Batch(4, 2, 256, 512), remat=Remat("full")),
    "one rank, adapters": Plan(Layout(), Batch(4, 1, 256, 512), lora=ADAPTERS),
    "one rank, products in float8": Plan(
        Layout(),
        Batch(4, 1, 256, 512),
        precision=Precision("bf16", products="float8", exclude=("*.gate", "*.up", "*.down")),
    ),
    "ddp, selective": Plan(Layout(dp_replicate=2), Batch(4, 1, 256, 512), remat=Remat("selective")),
    "zero3, bf16": Plan(Layout(dp_shard=2), Batch(4, 1, 256, 512), Shard("zero3"), Precision("bf16")),
    "zero2": Plan(Layout(dp_shard=2), Batch(4, 1, 256, 512), Shard("zero2")),
}


def peak_of_a_step(rank: int, ranks: int, plan: Plan) -> int:
    """Bytes at the highest moment of a step on a rank, its batch included: on several ranks the lowest of four steps
    that are measured, since beside other work gloo's threads let go of their copies late in some steps."""
    cpu, groups, batch = torch.device("cpu"), meshes(plan.layout, "cpu"), plan.batch
    recipe = Recipe.model_validate({"lora": {"rank": 8, "alpha": 16}} if plan.lora else {})
    state = build(recipe, SPEC, plan, groups, cpu)
    rules, peaks = rules_of(plan, OptimSection()), []
    for _ in range(4 if ranks > 1 else 1):
        meter = Meter(groups, cpu)
        for number in range(Meter.MEMORY_STEP):
            with meter.measuring(state):
                rows = [tokens(batch) for _ in range(batch.accumulation)]
                step(state, rows, number, rules)
                del rows
        assert meter.memory is not None
        peaks.append(meter.memory.peak_bytes)
    return min(peaks)


def tokens(batch: Batch) -> MicroBatch:
    size = (batch.micro_batch_size, batch.seq_len)
    ids, labels = (torch.randint(SPEC.vocab_size, size) for _ in range(2))
    return MicroBatch(ids, labels, torch.arange(batch.seq_len).repeat(size[0], 1), None, batch.seq_len)


@pytest.mark.prove
@pytest.mark.parametrize("case", CASES)
def test_a_real_steps_peak_is_within_a_hundredth_of_the_plans(case: str, ranks: RankPool) -> None:
    plan = CASES[case]
    sheet = techniques.cost(sheet_of(SPEC, plan), plan)
    planned = folded(sheet, plan).top_bytes
    assert planned == fold(schedule(sheet, plan)).top_bytes
    for measured in ranks.run(peak_of_a_step, plan, world=plan.layout.world, timeout_s=240):
        assert abs(measured / planned - 1) <= 0.01, (measured, planned)
