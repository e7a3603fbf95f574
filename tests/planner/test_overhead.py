"""What a CUDA device holds beside the tensors of a step is in the plan, as torch and NCCL have it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise import techniques
from shardwise.distributed.fake_world import fake_world
from shardwise.models.config import ModelSpec, with_fields
from shardwise.models.lookup import load_spec
from shardwise.planner import overhead
from shardwise.planner.price import price
from shardwise.planner.schedule import schedule
from shardwise.planner.sheets import sheet_of
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.explain import memory_lines
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Precision, Shard, Strategy
from shardwise.spec.sheet import Sheet, Unit
from shardwise.techniques.events import Compute, Free, Make

MIB = 2**20
EIGHT_B = load_spec("meta-llama/Llama-3.1-8B")
PLAN = Plan(Layout(dp_shard=8), Batch(1, 1, 4096, 512), Shard("zero3"), Precision("bf16"))
LINES = ("attention workspace", "cuBLAS workspaces", "allocator rounding", "NCCL buffers")


def costed(spec: ModelSpec, plan: Plan) -> Sheet:
    return techniques.cost(sheet_of(spec, plan), plan)


def workspace(spec: ModelSpec, plan: Plan) -> int:
    """Of the first block's attention."""
    block: Unit = costed(spec, plan).blocks[0]
    (op,) = (op for op in block.backward if op.kind == "attention")
    sizes = plan.batch.micro_batch_size, plan.batch.seq_len
    return overhead.attention_bytes(op, sizes, plan.precision.compute, deterministic=plan.deterministic)


def test_the_workspace_of_flash_attentions_backward() -> None:
    """32 heads of 128 that share 8 key heads, 4,096 tokens in 16 documents, each with 128 rows more: sums of q's
    gradient and one number a row in fp32, gradients of k and v for every query head in bf16."""
    rows = 4096 + 16 * 128
    sums, numbers, expanded = rows * 32 * 128 * 4, rows * 32 * 4, 2 * 4096 * 32 * 128 * 2
    assert workspace(EIGHT_B, PLAN) == sums + numbers + expanded
    assert workspace(EIGHT_B, replace(PLAN, batch=Batch(3, 1, 4096, 512))) == 3 * (sums + numbers + expanded)
    assert workspace(with_fields(EIGHT_B, num_key_value_heads=32), PLAN) == sums + numbers
    assert workspace(EIGHT_B, replace(PLAN, deterministic=True)) == 6 * sums + numbers + expanded  # 192 / 32
    assert workspace(EIGHT_B, replace(PLAN, precision=Precision())) == 0, "no flash in fp32"
    for head_dim, padded in ((80, 96), (200, 256)):
        odd = with_fields(EIGHT_B, num_key_value_heads=32, head_dim=head_dim)
        assert workspace(odd, PLAN) == rows * 32 * (padded + 1) * 4


def test_it_is_there_while_attention_runs_backward_and_no_longer() -> None:
    on_paper = costed(EIGHT_B, PLAN)
    events = schedule(on_paper, PLAN, kind="cuda")
    made = [i for i, event in enumerate(events) if isinstance(event, Make) and event.category == LINES[0]]
    assert len(made) == 32
    for index in made:
        event = events[index]
        assert isinstance(event, Make) and event.bytes == workspace(EIGHT_B, PLAN)
        *gradients, run = events[index - 4 : index]
        assert [each.bytes for each in gradients if isinstance(each, Make)] == [
            4096 * 32 * 128 * 2,
            *[4096 * 8 * 128 * 2] * 2,
        ], "with the gradients of q, k and v"
        assert isinstance(run, Compute) and events[index + 1] == Free(*event)
    assert not any(isinstance(each, Make) and each.category == LINES[0] for each in schedule(on_paper, PLAN))


def test_workspaces_of_cublas() -> None:
    """For the thread of forward and for that of backward."""
    for name, each in (("8xH100", 32 * MIB), ("8xA100", 8 * MIB + 128 * 1024), ("8xB200", 32 * MIB)):
        assert price(EIGHT_B, PLAN, parse_cluster(name)).estimate.memory[LINES[1]] == 2 * each
    exact = price(EIGHT_B, replace(PLAN, deterministic=True), parse_cluster("8xA100"))
    assert exact.estimate.memory[LINES[1]] == 2 * 32 * MIB


def test_the_allocators_sizes_are_torchs() -> None:
    header = (Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h").read_text()
    for name, value in (
        ("kMinBlockSize = ", overhead.BLOCK_BYTES),
        ("kSmallBuffer = ", overhead.SMALL_SEGMENT_BYTES),
        (r"large_segment_size_\{", overhead.LARGE_SEGMENT_BYTES),
    ):
        found = re.search(rf"{name}(\d+)", header)
        assert found is not None and int(found[1]) == value, name


def test_what_the_allocator_rounds_up() -> None:
    """A vector of 100 fp32 numbers takes 512 bytes of each of weight, gradient and moments, a matrix of 64 x 16 fits;
    each has a count of steps; one stream computes, two more gather and reduce, and one sums over replicas."""
    paper = sheet_of(EIGHT_B, PLAN)
    vector, matrix = (replace(paper.embedding.weights[0], shape=shape, dtype="fp32") for shape in ((100,), (64, 16)))
    small = replace(paper, embedding=replace(paper.embedding, weights=(vector, matrix)), blocks=(), order=())
    small = replace(small, head=replace(paper.head, weights=(replace(vector, trained=False),)))
    rest = 4 * 112 + 512 + 512 + 112
    for layout, strategy, streams in (
        (Layout(dp_replicate=8), "ddp", 1),
        (Layout(dp_shard=8), "zero3", 3),
        (Layout(2, 4), "zero2", 4),
    ):
        plan = Plan(layout, shard=Shard(strategy))  # type: ignore[arg-type]
        found = overhead.standing_bytes(small, plan, parse_cluster("8xH100"))["allocator rounding"]
        assert found == rest + streams * 22 * MIB


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_replicate=4), Layout(dp_shard=4), Layout(2, 2)])
def test_a_communicator_for_each_group_of_ranks(layout: Layout) -> None:
    plan = Plan(layout, shard=Shard("ddp" if layout.dp_shard == 1 else "zero3"))
    with fake_world(layout) as made:
        groups = {group.group_name for group in made.groups.values()}
    assert len(overhead.communicators(plan)) == len(groups)


@pytest.mark.parametrize(
    ("layout", "strategy", "connections"),
    [
        (Layout(dp_shard=2, cp=2, tp=2, pp=2), "zero3", [1, 3, 3, 3, 3]),  # fsdp (both of dp_shard and cp), pp, cp, tp
        (Layout(dp_replicate=2, cp=2, pp=2), "ddp", [3, 3, 3, 3]),  # loss (both of dp_replicate and cp), pp, cp
        (Layout(cp=4), "zero3", [3]),
        (Layout(cp=2, tp=2), "ddp", [3, 3, 3]),
        (Layout(dp_shard=4, tp=2, ep=4), "zero3", [1, 1, 3, 3, 3]),  # fsdp, expert_fsdp, tp, ep
        (Layout(dp_shard=4, ep=4), "zero3", [3]),
        (Layout(dp_replicate=2, dp_shard=4, ep=2), "zero3", [1, 1, 3, 3, 3]),
    ],
)
def test_communicators_of_every_axis(layout: Layout, strategy: Strategy, connections: list[int]) -> None:
    """Rings of those who hold slices of a weight, trees too for all others, the world's last; groups of the same ranks
    share one."""
    assert overhead.communicators(Plan(layout, shard=Shard(strategy))) == connections


def test_the_buffers_of_nccl() -> None:
    """Of each protocol one for each channel and connection: 0.5, 4.7 and 4 MiB."""
    assert round(overhead.CHANNEL_BYTES / MIB, 2) == 9.19
    kept = replace(PLAN, shard=Shard("zero3", 4))
    hybrid = replace(PLAN, layout=Layout(2, 4))
    for plan, cluster, count in (
        (PLAN, "8xH100", 3 * 24),
        (kept, "8xH100", 4 * 24),
        (hybrid, "8xH100", 7 * 24),
        (PLAN, "8x4090", 3 * 4),
        (replace(PLAN, layout=Layout(), shard=Shard()), "1xH100", 0),
    ):
        found = overhead.standing_bytes(costed(EIGHT_B, plan), plan, parse_cluster(cluster))["NCCL buffers"]
        assert found == count * overhead.CHANNEL_BYTES


def test_plan_prints_a_line_of_each() -> None:
    """Attention is at the peak, since its heads are wider than the rest of a block."""
    plan = replace(PLAN, batch=Batch(8, 1, 4096, 512))
    spec = replace(EIGHT_B, vocab_size=256, hidden_size=1024, num_hidden_layers=2, intermediate_size=512)
    found = price(spec, plan, parse_cluster("8xH100")).estimate
    shown = "\n".join(memory_lines(found))
    for line in LINES:
        assert found.memory[line] > 0 and line in shown
    assert found.allocated_bytes == found.peak_bytes - sum(found.memory[name] for name in (*LINES[2:], "reserve"))
    cpu = price(spec, plan, parse_cluster("8xCPU")).estimate
    assert not any(cpu.memory[name] for name in (*LINES, "reserve"))
    assert cpu.allocated_bytes == cpu.peak_bytes
