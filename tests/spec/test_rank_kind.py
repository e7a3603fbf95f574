"""Kinds of rank: what they hold and where they stand."""

from __future__ import annotations

import pytest

from shardwise.spec.layout import Layout
from shardwise.spec.rank_kind import RankKind, rank_kind_of, rank_kinds

STAGES = [(0, 1, 2), (3, 4), (5, 6)]
WHOLE = Layout(pp=3, dp_replicate=2, dp_shard=4, cp=1, tp=2)


def test_the_first_stage_has_the_stem_and_the_last_the_head() -> None:
    found = [rank_kind_of(rank, WHOLE, STAGES) for rank in range(WHOLE.world)]
    assert [rank_kind.embedding for rank_kind in found] == [rank < 16 for rank in range(48)]
    assert [rank_kind.head for rank_kind in found] == [rank >= 32 for rank in range(48)]
    assert [rank_kind.blocks for rank_kind in found] == [STAGES[rank // 16] for rank in range(48)]


def test_a_place_stands_where_its_rank_stands() -> None:
    for rank in range(WHOLE.world):
        rank_kind = rank_kind_of(rank, WHOLE, STAGES)
        assert rank_kind.coordinate("dp_shard") == rank // 2 % 4
        assert rank_kind.index("fsdp") == rank // 2 % 4
        assert rank_kind.index("batch") == rank % 16 // 2


def test_every_rank_has_as_much_as_one_of_the_places_or_stands_between_two() -> None:
    """Of a dim that divides unevenly the first ranks have most and the last least."""
    sizes = (1, 2, 7, 12)
    for layout in (Layout(), Layout(dp_shard=5), Layout(dp_shard=3, tp=4), Layout(dp_shard=2, cp=2, tp=2)):
        kinds = rank_kinds(layout, [range(2)], {"fsdp": sizes, "tp": sizes})
        assert kinds[0] == RankKind(layout, 0, range(2)) and len(set(kinds)) == len(kinds)
        for group in ("fsdp", "tp"):
            for size in sizes:
                here = {stop - start for start, stop in (rank_kind.part(size, group) for rank_kind in kinds)}
                for rank in range(layout.world):
                    start, stop = rank_kind_of(rank, layout, [range(2)]).part(size, group)
                    assert min(here) <= stop - start <= max(here)


def test_the_parts_of_a_dim_are_the_whole_dim() -> None:
    layout = Layout(dp_shard=5, tp=2)
    for size in (3, 10, 12):
        held = [i for rank in range(0, 10, 2) for i in range(*rank_kind_of(rank, layout, [()]).part(size, "fsdp"))]
        assert held == list(range(size))


def test_ranks_that_hold_as_much_are_of_one_kind() -> None:
    """Replicas; those of a group that cuts evenly; and of ten ids over four ranks the first three."""
    assert len(rank_kinds(Layout(dp_replicate=8), [()], {"fsdp": {7}, "tp": {7}})) == 1
    assert len(rank_kinds(Layout(dp_shard=4, tp=2), [()], {"fsdp": {8, 12}, "tp": {10}})) == 1
    assert [rank_kind.rank for rank_kind in rank_kinds(Layout(dp_shard=4, tp=2), [()], {"fsdp": {10}})] == [0, 6]
    found = rank_kinds(Layout(dp_shard=4, tp=2), [()], {"fsdp": {10, 9}, "tp": {9}})
    assert [rank_kind.rank for rank_kind in found] == [0, 1, 6, 7]


def test_of_many_ranks_a_middle_one_has_less_than_the_first_and_more_than_the_last() -> None:
    """Of 128,256 ids over 512 ranks the first have 251 and the last none; of 9 over 8 the first four have 2, the fifth
    has 1."""
    ranks = [rank_kind.rank for rank_kind in rank_kinds(Layout(dp_shard=512), [()], {"fsdp": {128_256}})]
    assert ranks == [0, 511]
    assert [rank_kind.rank for rank_kind in rank_kinds(Layout(dp_shard=8), [()], {"fsdp": {9}})] == [0, 4, 7]


def test_stages_are_of_three_kinds() -> None:
    found = rank_kinds(Layout(pp=4, dp_shard=2), [(i,) for i in range(4)], {})
    assert [(rank_kind.embedding, rank_kind.blocks, rank_kind.head) for rank_kind in found] == [
        (True, (0,), False),
        (False, (2,), False),
        (False, (3,), True),
    ]


def test_stages_must_be_as_many_as_the_layout_has() -> None:
    with pytest.raises(ValueError, match="3 stages"):
        rank_kinds(Layout(), STAGES, {})
