"""The kernels that the operations of a unit become, against sums over its operations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise import techniques
from shardwise.models.config import with_fields
from shardwise.models.lookup import load_spec
from shardwise.planner.seconds.kernels import durations, loss_durations, number, seen
from shardwise.planner.sheets import sheet_of
from shardwise.spec.layout import Layout
from shardwise.spec.measured import Measured, Pointwise
from shardwise.spec.plan import Batch, Plan, Precision, Shard
from shardwise.spec.sheet import Sheet, Unit
from tests.planner.seconds.test_rates import PLAIN

ONE_B = load_spec("meta-llama/Llama-3.2-1B")
GEMMA = load_spec("google/gemma-2-9b")
B, S = 2, 4096
ZERO3 = Layout(dp_shard=8, ranks_per_node=8)
PLAN = Plan(ZERO3, Batch(B, 1, S, 1024), Shard("zero3"), Precision("bf16"))
QUIET = replace(PLAIN, gap_s=0.0)
WIDE = with_fields(
    ONE_B, name="wide", num_hidden_layers=1, hidden_size=4096, head_dim=128, num_experts=8, experts_per_token=2
)
PASSES = ("forward", "backward")


def sheet(spec: object = ONE_B, plan: Plan = PLAN) -> Sheet:
    return techniques.cost(sheet_of(spec, plan), plan)  # type: ignore[arg-type]


def total_s(unit: Unit, direction: str, kind: str, rates: object = QUIET) -> float:
    return sum(t.device_ns for t in durations(unit, direction, rates, B, S) if t.kind == kind) / 1e9  # type: ignore[arg-type]


def test_products_of_a_block() -> None:
    """Forward 2 P b s operations of its P weights in products, backward twice that; each is a launch."""
    (block,) = sheet().blocks
    d, f, kv = 2048, 8192, 512
    flops = 2 * (2 * d * d + 2 * kv * d + 3 * d * f) * B * S
    for direction, times in zip(PASSES, (1, 2), strict=True):
        assert total_s(block, direction, "products") == pytest.approx(times * flops / 1e14, rel=1e-4)
        found = durations(block, direction, PLAIN, B, S)
        ops = block.forward if direction == "forward" else block.backward
        for op, time in zip(ops, found, strict=True):
            if op.kind == "matmul":
                assert time.host_ns == 7_000


@pytest.mark.parametrize("size", [2048, 4096])
def test_products_of_experts(size: int) -> None:
    """Each token's row is multiplied by three matrices for each of its 2 experts, forward and twice backward, and where
    these are narrow at a lower rate; the host of a GPU waits once a layer, of which each product bears its part."""
    (block,) = sheet(with_fields(WIDE, expert_size=size)).blocks
    each_s = 2 * 3 * 4096 * size * 2 * B * S / 1e14
    others = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 8) * B * S / 1e14
    for direction, times in zip(PASSES, (1, 2), strict=True):
        plain_s = total_s(block, direction, "products")
        assert plain_s == pytest.approx(times * (each_s + others), rel=1e-2)
        slow_s = total_s(block, direction, "products", replace(QUIET, grouped=0.5))
        assert slow_s - plain_s == pytest.approx(times * each_s if size < 4096 else 0.0, rel=1e-4, abs=1e-6)
        for rates, waited in ((QUIET, 3_000_000 * times), (replace(QUIET, cuda=False), 0)):
            found = (durations(block, direction, replace(rates, experts_s=wait_s), B, S) for wait_s in (9e-3, 0.0))
            waits, none = (sum(one.host_ns for one in each) for each in found)
            assert waits - none == waited


def test_attention_of_a_block() -> None:
    """4 operations a pair, head and element forward, of which a causal mask leaves half, and 10 backward."""
    (block,) = sheet().blocks
    once = 4 * 32 * 64 * B * S * S / 2
    assert total_s(block, "forward", "attention") == pytest.approx(once / 5e13, rel=1e-4)
    assert total_s(block, "backward", "attention") == pytest.approx(2.5 * once / 5e13, rel=1e-4)


def test_a_window_leaves_fewer_pairs() -> None:
    wide, narrow = (next(b for b in sheet(GEMMA).blocks if (b.window is None) is whole) for whole in (True, False))
    assert narrow.window == 4096
    found = {s: [durations(b, "forward", QUIET, 1, s) for b in (wide, narrow)] for s in (4096, 8192)}
    attention = {
        s: [sum(t.device_ns for t in each if t.kind == "attention") for each in both] for s, both in found.items()
    }
    assert attention[4096][0] == pytest.approx(attention[4096][1])
    assert attention[8192][1] / attention[8192][0] == pytest.approx(seen(8192, 4096) / 8192**2) == 0.75


def test_exponentials_of_a_block_and_of_the_loss_take_their_own_time() -> None:
    """Here none takes any but those: of a block silu forward, silu again and its gradient backward; of each chunk of
    the loss the sum of exponentials and the gradient."""
    none, own = ((Pointwise(10**15, seconds),) for seconds in (0.0, 1e-3))  # what moves less takes as long
    rates = replace(QUIET, cuda=False, measured=Measured(1, pointwise=none, transcendental=own))
    costed = sheet()
    (block,) = costed.blocks
    for direction, count in zip(PASSES, (1, 2), strict=True):
        assert total_s(block, direction, "pointwise", rates) == pytest.approx(count * 1e-3)
    chunks = B * S // 1024
    assert loss_durations(costed, PLAN, rates, 3)[1].device_ns == pytest.approx(2 * chunks * 1e6)


@pytest.mark.parametrize("direction", PASSES)
def test_eager_operations_each_move_all_of_their_own(direction: str) -> None:
    (block,) = sheet().blocks
    ops = block.forward if direction == "forward" else block.backward
    plain = [op for op in ops if op.kind == "elementwise" and not op.dims]
    moved = sum(number(dim, (B, S)) for op in plain for dim in (*op.read, *op.written))
    assert total_s(block, direction, "pointwise") == pytest.approx(moved / 1e12, rel=1e-3)
    launched = sum(t.host_ns for t in durations(block, direction, PLAIN, B, S) if t.kind == "pointwise")
    kernels = [op for op in plain if not op.name.startswith(("aten.empty", "aten.new_empty"))]
    assert launched == 7_000 * len(kernels)


def test_fused_runs_read_and_write_what_stands_at_their_ends() -> None:
    """Forward, in rows of hidden states: norm 2, rotation 2 (1 + 1/4), sum and norm 4, gate 3 x 4, sum 3."""
    (block,) = sheet().blocks
    row = 2 * B * S * 2048
    fused = replace(QUIET, blocks="compiled")
    rows = 2 + 2 * 1.25 + 4 + 3 * 4 + 3
    assert total_s(block, "forward", "pointwise", fused) == pytest.approx(rows * row / 1e12, rel=1e-2)
    for direction in PASSES:
        eager, less = (total_s(block, direction, "pointwise", rates) for rates in (QUIET, fused))
        assert less < 0.7 * eager
        eager_ns, less_ns = (
            sum(t.host_ns for t in durations(block, direction, rates, B, S)) for rates in (QUIET, fused)
        )
        assert less_ns < 0.6 * eager_ns


def test_a_sum_over_tokens_is_a_kernel_of_its_own() -> None:
    """Backward, in rows of hidden states: the gate reads 3 and writes 2 of 4 rows each, rotation 2 (1 + 1/4), a sum 3.
    A norm reads two gradients of its output, that of the sum beside it and its input, and writes one; the gradient of
    its weight reads those four again. With two norms that are 7 kernels."""
    (block,) = sheet().blocks
    row = 2 * B * S * 2048
    rows = 5 * 4 + 2 * 1.25 + 3 + 2 * ((4 + 1) + 4)
    compiled = replace(PLAIN, blocks="compiled")
    found = [t for t in durations(block, "backward", compiled, B, S) if t.kind == "pointwise" and t.host_ns]
    assert sum(t.host_ns for t in found) == 7 * 7_000
    took_s = sum(t.device_ns for t in found) / 1e9 - 7 * PLAIN.gap_s
    assert took_s == pytest.approx(rows * row / 1e12, rel=1e-2)


def test_replicas_cast_their_weights_in_every_pass() -> None:
    """Of fp32 masters 4 bytes are read and 2 written; FSDP2 casts slices before it gathers them."""
    plan = replace(PLAN, layout=Layout(dp_replicate=8, ranks_per_node=8), shard=Shard("ddp"))
    (mine,), (sharded,) = sheet(plan=plan).blocks, sheet().blocks
    for rates in (QUIET, replace(QUIET, blocks="compiled")):
        more = total_s(mine, "forward", "pointwise", rates) - total_s(sharded, "forward", "pointwise", rates)
        products = 2 * 2048**2 + 2 * 512 * 2048 + 3 * 2048 * 8192
        assert more == pytest.approx(6 * products / 1e12, rel=0.02)


def test_only_blocks_are_compiled() -> None:
    """The ends of the model are not."""
    head, compiled = sheet().head, replace(QUIET, blocks="compiled")
    assert durations(head, "forward", compiled, B, S) == durations(head, "forward", QUIET, B, S)
    fused = replace(QUIET, blocks="fused")
    assert total_s(head, "forward", "pointwise", fused) < total_s(head, "forward", "pointwise")


def test_the_embedding_reads_the_rows_that_it_looks_up() -> None:
    embedding = sheet().embedding
    look_up = durations(embedding, "forward", QUIET, B, S)[0].device_ns / 1e9
    assert look_up == pytest.approx(2 * 2 * B * S * 2048 / 1e12, rel=1e-3)


@pytest.mark.parametrize("chunk", [1024, B * S])
def test_the_loss_multiplies_all_tokens_and_passes_over_logits(chunk: int) -> None:
    """28 bytes a logit, and 2 for the first choice; in chunks also the fp32 gradient of the output weight, read and
    written for each."""
    plan = replace(PLAN, batch=replace(PLAN.batch, loss_chunk_tokens=chunk))
    multiplied, rest = loss_durations(sheet(plan=plan), plan, QUIET, 3)
    vocabulary, chunks = 128_256, B * S // chunk
    assert multiplied.device_ns / 1e9 == pytest.approx(3 * 2 * B * S * vocabulary * 2048 / 1e14, rel=1e-3)
    moved = (28 + 2) * B * S * vocabulary + (2 * 4 * vocabulary * 2048 * chunks if chunks > 1 else 0)
    assert rest.device_ns / 1e9 == pytest.approx(moved / 1e12, rel=1e-3)
    halved = loss_durations(sheet(plan=plan), plan, replace(QUIET, logits=0.5), 3)[1]
    assert halved.device_ns < rest.device_ns


def test_a_compiled_loss_reads_logits_twice_and_writes_their_gradient() -> None:
    """6 bytes a logit, unless ranks share the vocabulary."""
    plan = replace(PLAN, batch=replace(PLAN.batch, loss_chunk_tokens=B * S))
    made = loss_durations(sheet(plan=plan), plan, replace(QUIET, fused_loss=True), 3)[1]
    assert made.device_ns / 1e9 == pytest.approx(6 * B * S * 128_256 / 1e12, rel=1e-3)
    shared = replace(plan, layout=Layout(dp_shard=2, tp=4, ranks_per_node=8), sequence_parallel=True)
    mine = sheet(plan=shared)
    both = [loss_durations(mine, shared, replace(QUIET, fused_loss=fused), 3)[1] for fused in (False, True)]
    assert both[0] == both[1]


def test_the_ranks_of_tensor_parallelism_share_the_products() -> None:
    (whole,) = sheet().blocks
    plan = replace(PLAN, layout=Layout(dp_shard=2, tp=4, ranks_per_node=8), sequence_parallel=True)
    (mine,) = sheet(plan=plan).blocks
    assert total_s(mine, "forward", "products") == pytest.approx(total_s(whole, "forward", "products") / 4, rel=1e-3)
    assert total_s(mine, "forward", "attention") == pytest.approx(total_s(whole, "forward", "attention") / 4, rel=1e-3)
