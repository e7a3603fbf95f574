"""Tensors on paper."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from shardwise.spec.layout import Layout
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.sheet import Op, Tensor, is_control, size_of
from tests.planner.bound import op_of, tensor_of

WEIGHT = Tensor("a", (96, 5), "weights", "moments", (("fsdp", 0),), "statistics", False, ("4*f", "d"))


def test_a_tensor_in_other_types_is_else_the_same() -> None:
    defaults = {field.name: field.default for field in fields(Tensor)}
    assert all(getattr(WEIGHT, name) != default for name, default in defaults.items())
    assert WEIGHT.typed("bf16", "fp32") == replace(WEIGHT, dtype="bf16", used_as="fp32")
    assert WEIGHT.cut(("tp", 1)) == replace(WEIGHT, shards=(("tp", 1),))


def test_symbols_are_bound_to_numbers() -> None:
    sizes = {"f": 24, "d": 5}
    assert tensor_of(WEIGHT, sizes) == WEIGHT and tensor_of(WEIGHT, {"f": 6, "d": 5}).shape == (24, 5)
    activation = Tensor("x", ("b*s", "2*f"), "bf16", symbols=("b*s", "2*f"))
    assert tensor_of(activation, sizes).shape == ("b*s", 48)
    assert tensor_of(replace(activation, symbols=()), sizes).shape == ("b*s", "2*f")  # traced with its own numbers
    assert op_of(Op("matmul", "mm", symbols="2*d*f"), sizes).flops == 240
    assert [size_of(dim, sizes) for dim in (3, "f", "3*f*d")] == [3, 24, 360]


@pytest.mark.parametrize(
    ("ranks", "rank", "padded", "rows"),
    [
        (8, 0, True, 12),
        (8, 7, False, 12),
        (512, 0, True, 1),
        (512, 95, False, 1),
        (512, 96, False, 0),
        (7, 6, False, 12),
    ],
)
def test_a_cut_weight(ranks: int, rank: int, padded: bool, rows: int) -> None:
    """FSDP2 cuts 96 rows in 7 as 14, ..., 14, 12, and allocates 14 on each."""
    assert WEIGHT.local_numel(RankKind(Layout(dp_shard=ranks), rank), padded) == 5 * rows


def test_a_weight_is_cut_over_all_ranks_of_its_group() -> None:
    """Those that read other tokens of the same rows, too; and a second cut is within the first."""
    layout = Layout(dp_shard=2, cp=2, tp=3)
    rows = [WEIGHT.local_numel(RankKind(layout, rank), False) // 5 for rank in range(layout.world)]
    assert rows == [24] * 12
    twice = WEIGHT.cut(("tp", 0), ("fsdp", 0))
    assert sum(twice.local_numel(RankKind(layout, rank), False) for rank in range(layout.world)) == 96 * 5


def test_sizes_grow_with_the_batch() -> None:
    activation = Tensor("x", ("b", 4, "s"), "bf16")
    assert activation.numel(3, 7) == 84
    assert activation.bytes(3, 7) == 168
    assert Tensor("y", ("b*s", 2), "fp32").bytes(3, 7) == 168


def test_what_counts_as_control() -> None:
    """Counts, norms and votes, which are small; how many rows each expert gets is a part of what experts send."""
    assert is_control("all_reduce", 64) and is_control("all_gather", 8)
    assert not is_control("all_reduce", 65) and not is_control("all_to_all", 8)
