"""What dequantising costs: counted beside the operation itself, and by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.models.lookup import load_spec
from shardwise.planner.search import choose
from shardwise.planner.seconds import kernels
from shardwise.planner.seconds.rates import DEQUANTISED_BYTES, own_traits, rates_of
from shardwise.planner.sheets import sheet_of
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.load import load_recipe
from shardwise.spec.plan import Lora, Plan, Precision
from shardwise.techniques.frozen_float8 import eightbit
from shardwise.techniques.nf4 import fourbit

pytestmark = pytest.mark.usefixtures("by_table")

ROWS, COLUMNS = 2048, 4096  # two rounds
MOVES = ("aten._to_copy", "aten.embedding", "aten.mul_", "aten.copy_")


class Moved(TorchDispatchMode):
    """Bytes that the kernels of a round read and write, and how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.kernels = 0

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        made = function(*given, **(named or {}))
        if str(function).startswith(MOVES) and made.numel() >= ROWS * COLUMNS // 4:
            table = str(function).startswith("aten.embedding")
            read = given[1:2] if table or str(function).startswith("aten.copy_") else given[:1]
            self.bytes += sum(each.numel() * each.element_size() for each in (*read, made))
            self.kernels += 1
        return made


def test_bytes_are_those_of_the_operation() -> None:
    weight = torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16)
    kept, counted = fourbit.quantise(weight), Moved()
    with counted:
        fourbit._dequantise._init_fn(*kept, torch.bfloat16, None, 1)
    one_pass = 0.5 + 2
    assert counted.bytes / weight.numel() == pytest.approx(DEQUANTISED_BYTES + one_pass)
    assert counted.kernels == 2 * kernels.DEQUANTISE_KERNELS


def test_float8_moves_seven_bytes_an_element() -> None:
    """The code, the result that it is widened to, and that again, read and written as it is multiplied."""
    kept, counted = eightbit.coded(torch.randn(ROWS, COLUMNS)), Moved()
    with counted:
        eightbit._from_float8._init_fn(*kept, torch.bfloat16, None, 1, False)
    assert counted.bytes == 7 * ROWS * COLUMNS
    cluster, spec = parse_cluster("8xH100"), load_spec("meta-llama/Llama-3.1-8B")
    plan = Plan(Layout(dp_replicate=8), precision=Precision("bf16"), lora=Lora(16, frozen="bf16", float8=True))
    sheet = sheet_of(spec, plan)
    unit = sheet.blocks[sheet.order[0]]
    op = next(op for op in unit.forward if op.name == kernels.FROM_FLOAT8)
    rates, elements = rates_of(plan, cluster, own_traits()), 4096 * 4096
    moved_s = 7 * elements * rates.bytes_share / rates.memory_bytes_per_s
    took = kernels._of(op, unit, rates, (1, 1024))
    assert took.device_ns == pytest.approx(1e9 * (moved_s + kernels.FROM_FLOAT8_KERNELS * rates.gap_s), rel=2e-3)


def test_a_plan_s_dequantising_by_hand() -> None:
    """The first projection of an 8B, 4,096 x 4,096 in four rounds of 2**22 elements: codes, scales and result, and 20
    bytes an element; where it is one kernel, without those."""
    cluster, spec = parse_cluster("8xH100"), load_spec("meta-llama/Llama-3.1-8B")
    asked = load_recipe(None, ["model=meta-llama/Llama-3.1-8B", "lora.rank=16", "lora.frozen=nf4"])
    plan = choose(asked, spec, cluster)
    sheet = sheet_of(spec, plan)
    unit = sheet.blocks[sheet.order[0]]
    op = next(op for op in unit.forward if op.name == kernels.DEQUANTISE)
    rates = rates_of(plan, cluster, own_traits())
    elements = 4096 * 4096
    given = elements / 2 + elements / 64 + 4 * (elements / 64 / 256 + 1) + 2 * elements
    moved_s = (given + 20 * elements) * rates.bytes_share / rates.memory_bytes_per_s
    assert kernels._of(op, unit, rates, (1, 1024)).device_ns == pytest.approx(
        1e9 * (moved_s + 16 * rates.gap_s), rel=1e-3
    )
    one = replace(rates, dequantised=0.0)
    moved_s = given * rates.bytes_share / rates.memory_bytes_per_s
    took = kernels._of(op, unit, one, (1, 1024))
    assert took.device_ns == pytest.approx(1e9 * (moved_s + rates.gap_s), rel=1e-3)
