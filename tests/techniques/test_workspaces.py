"""What the operations that run in rounds hold meanwhile: plans' formulas beside torch's records of real calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from shardwise.runtime.metrics.measure import highest_bytes, start_quietly
from shardwise.techniques.lora import dora
from shardwise.techniques.nf4 import fourbit
from shardwise.techniques.quantised import AT_ONCE, dequantise_bytes, row_norms_bytes, rows_at_once

SHAPES = {"one round": (96, 192), "rounds that divide the rows": (2048, 4096), "a short last round": (1100, 4096)}
RANK = 16
SMALL_BYTES = 4096
"""What neither formula counts: tables and the numbers of a few rows."""


def held_bytes(call: Callable[[], Tensor]) -> int:
    """The most that is allocated in ``call`` besides its result."""
    call()  # which keeps its tables
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    start_quietly(profiler)
    result = call()
    profiler.stop()
    return highest_bytes(profiler) - result.nbytes


def test_the_shapes_are_of_one_round_and_of_more() -> None:
    rounds = {name: divmod(rows, rows_at_once(rows, columns)) for name, (rows, columns) in SHAPES.items()}
    assert rounds["one round"] == (1, 0)
    assert rounds["rounds that divide the rows"] == (2, 0)
    assert rounds["a short last round"] == (1, 1100 - AT_ONCE // 4096)


@pytest.mark.parametrize("piece", [None, fourbit.MatrixPiece(3, 1, 99)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_dequantisation_holds_what_plans_say(shape: str, piece: fourbit.MatrixPiece | None) -> None:
    rows, columns = SHAPES[shape]
    codes, sizes = (torch.zeros(rows, columns // size, dtype=torch.uint8) for size in (2, 64))
    groups = torch.zeros((rows + 3) * 99 // 256 + 2 + rows * columns // 64 // 256, 4, dtype=torch.uint8)
    told = dequantise_bytes(rows, columns)
    for dtype in (torch.bfloat16, torch.float32):
        held = held_bytes(lambda dtype=dtype: fourbit.dequantise(codes, sizes, groups, dtype, piece))
        assert abs(held - told) <= SMALL_BYTES, (held, told)


@pytest.mark.parametrize("converted", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_of_rows_hold_what_plans_say(shape: str, converted: bool) -> None:
    """A and B in bf16, of which fp32 copies are made, or in fp32; the matrix in fp32, as 4 bits give it."""
    rows, columns = SHAPES[shape]
    held, told = held_by_norms(shape, converted, torch.float32), row_norms_bytes(rows, columns, RANK * converted)
    assert abs(held - told) <= SMALL_BYTES, (held, told)


@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_cpu_norms_of_rows_in_bf16_hold_a_round_more(shape: str) -> None:
    """Torch's addition on a CPU converts what it adds to fp32 apart, and on a GPU within its kernel, as plans say."""
    rows, columns = SHAPES[shape]
    held, told = held_by_norms(shape, False, torch.bfloat16), row_norms_bytes(rows, columns, 0)
    assert abs(held - told - 4 * rows_at_once(rows, columns) * columns) <= SMALL_BYTES, (held, told)


def held_by_norms(shape: str, converted: bool, weights: torch.dtype) -> int:
    rows, columns = SHAPES[shape]
    module = nn.Linear(columns, rows, bias=False, dtype=weights)
    dtype = torch.bfloat16 if converted else torch.float32
    module.lora_a = nn.Linear(columns, RANK, bias=False, dtype=dtype)
    module.lora_b = nn.Linear(RANK, rows, bias=False, dtype=dtype)
    return held_bytes(lambda: dora.row_norms(module, 2.0))
