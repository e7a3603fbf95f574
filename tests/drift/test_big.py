"""Drift of models that are trained in earnest: bytes equal and peaks within 3 %, on the first, a middle and the last
of 512 ranks; with tensor parallelism of 16,384, on the first and last of either axis; with a pipeline as well, on its
first, a middle and its last rank."""

from __future__ import annotations

import pytest

from shardwise.models.lookup import load_spec
from shardwise.prove.drift import PEAK_TOLERANCE, drift
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Pipeline, Plan, Precision, Remat, Shard
from shardwise.techniques.pp.actions import SCHEDULES
from shardwise.techniques.pp.split import split

BF16 = Precision("bf16")
ZERO3 = Shard("zero3")
CASES = {
    "70B, zero3 on 512, full recompute": (
        "Llama-3.1-70B",
        Plan(Layout(dp_shard=512), Batch(1, 1, 8192), ZERO3, BF16, Remat("full")),
    ),
    "70B, hybrid of 8 x 64, selective recompute, accumulation": (
        "Llama-3.1-70B",
        Plan(Layout(dp_replicate=8, dp_shard=64), Batch(1, 3, 4096), ZERO3, BF16, Remat("selective")),
    ),
    "8B, zero2 on 512, bf16 reduction": (
        "Llama-3.1-8B",
        Plan(Layout(dp_shard=512), Batch(2, 2, 4096), Shard("zero2"), Precision("bf16", reduce="bf16"), Remat("full")),
    ),
    "1B tied, ddp on 512": ("Llama-3.2-1B", Plan(Layout(dp_replicate=512), Batch(4, 1, 4096), Shard(), BF16)),
    "405B, zero3 on 512, full recompute": (
        "Llama-3.1-405B",
        Plan(Layout(dp_shard=512), Batch(1, 1, 4096), ZERO3, BF16, Remat("full")),
    ),
}


TENSOR_CASES = {
    "70B, tp 8, zero3 on 64": (
        "Llama-3.1-70B",
        Plan(Layout(dp_shard=64, tp=8), Batch(1, 1, 4096), ZERO3, BF16, Remat("full"), sequence_parallel=True),
    ),
    "405B, tp 8, zero3 on 2,048": (
        "Llama-3.1-405B",
        Plan(Layout(dp_shard=2048, tp=8), Batch(1, 1, 4096), ZERO3, BF16, Remat("full"), sequence_parallel=True),
    ),
}


@pytest.mark.big
@pytest.mark.parametrize("rank", [0, 256, 511])
@pytest.mark.parametrize("name", CASES)
def test_large_models(name: str, rank: int) -> None:
    model, plan = CASES[name]
    found = drift(load_spec(model), plan, rank)
    assert not found.differences()
    assert found.measured.peak_bytes > 2**30
    assert abs(found.peak_error) < PEAK_TOLERANCE


@pytest.mark.big
@pytest.mark.parametrize("corner", ["first", "last of tp", "last of dp", "last"])
@pytest.mark.parametrize("name", TENSOR_CASES)
def test_large_models_under_tensor_parallelism(name: str, corner: str) -> None:
    model, plan = TENSOR_CASES[name]
    world, tp = plan.layout.world, plan.layout.tp
    rank = {"first": 0, "last of tp": tp - 1, "last of dp": world - tp, "last": world - 1}[corner]
    found = drift(load_spec(model), plan, rank)
    assert not found.differences()
    assert found.measured.peak_bytes > 2**30
    assert abs(found.peak_error) < PEAK_TOLERANCE


@pytest.mark.big
@pytest.mark.parametrize("rank", [0, 128, 255])
def test_experts_over_16_ranks_whose_rows_are_over_4(rank: int) -> None:
    """Qwen3-235B-A22B at 32,768 tokens: each rank has 8 experts of every layer."""
    layout = Layout(dp_shard=64, cp=4, ep=16)
    found = drift(
        load_spec("Qwen3-235B-A22B"), Plan(layout, Batch(1, 1, 32_768, 1024), ZERO3, BF16, Remat("full")), rank
    )
    assert not found.differences()
    assert found.measured.peak_bytes > 2**30
    assert abs(found.peak_error) < PEAK_TOLERANCE


@pytest.mark.big
@pytest.mark.parametrize("place", [0, 8, 15])
@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_405b_in_three_dimensions(schedule: str, stages_per_rank: int, place: int) -> None:
    """126 blocks over 16 and 32 stages, on 16,384 ranks."""
    spec = load_spec("Llama-3.1-405B")
    blocks = split(spec, 8192, 16 * stages_per_rank)
    assert sum(blocks) == 126 and len(set(blocks)) > 1
    plan = Plan(
        Layout(dp_shard=128, pp=16, tp=8, v_shaped=SCHEDULES[schedule].shape == "v"),
        Batch(1, 16, 8192),
        Shard("zero1" if schedule == "zbv" else "zero2"),
        BF16,
        Remat("selective"),
        sequence_parallel=True,
        pipeline=Pipeline(schedule, stages_per_rank, blocks),
    )
    found = drift(spec, plan, plan.layout.rank({"pp": place, "dp_shard": 127 * (place > 0), "tp": 7 * (place > 8)}))
    assert not found.differences()
    assert found.measured.peak_bytes > 2**30
    assert abs(found.peak_error) < PEAK_TOLERANCE
