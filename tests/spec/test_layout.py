"""Who stands where, and in which group with whom, on all five axes."""

from __future__ import annotations

from itertools import product

import pytest

from shardwise.spec.layout import GROUPS, Layout
from shardwise.spec.plan import Plan, Shard

WHOLE = Layout(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=4, ranks_per_node=8)
LAYOUTS = [Layout(), Layout(dp_shard=4), Layout(dp_replicate=2, dp_shard=2), Layout(dp_shard=3, tp=2), WHOLE]


def test_ranks_are_numbered_with_tp_innermost() -> None:
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    places = product(*(range(WHOLE.degree(axis)) for axis in axes))  # type: ignore[arg-type]
    for rank, place in enumerate(places):
        assert tuple(WHOLE.coordinate(rank, axis) for axis in axes) == place  # type: ignore[arg-type]
    assert WHOLE.world == 96


def test_sizes_are_products_of_degrees() -> None:
    sizes = {"world": 96, "stage": 48, "loss": 12, "batch": 6, "fsdp": 6, "pp": 2, "cp": 2, "tp": 4, "dp_shard/3": 3}
    assert {group: WHOLE.size(group) for group in sizes} == sizes
    assert (WHOLE.dp, WHOLE.fsdp) == (6, 6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("group", GROUPS)
def test_the_groups_of_a_name_divide_the_world(layout: Layout, group: str) -> None:
    """Each rank is in one of them, under the number that it has there."""
    members = layout.members(group)
    assert sorted(rank for ranks in members for rank in ranks) == list(range(layout.world))
    for ranks in members:
        assert [layout.index(rank, group) for rank in ranks] == list(range(layout.size(group)))


def test_members_differ_on_the_axes_of_their_group_only() -> None:
    assert Layout(dp_shard=2, tp=2).members("batch") == [[0, 2], [1, 3]]
    assert Layout(dp_shard=2, tp=2).members("tp") == [[0, 1], [2, 3]]
    assert Layout(pp=2, dp_replicate=2, tp=2).members("loss") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert Layout(dp_replicate=2, dp_shard=2, cp=2).members("fsdp") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_ranks_with_the_same_rows_read_the_same() -> None:
    """Those of one tp or cp group, and of one pipeline."""
    assert [Layout(dp_shard=2, tp=2).index(rank, "batch") for rank in range(4)] == [0, 0, 1, 1]
    assert [Layout(pp=2, dp_shard=2).index(rank, "batch") for rank in range(4)] == [0, 1, 0, 1]
    assert [Layout(cp=2, dp_replicate=2).index(rank, "batch") for rank in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_token_is_counted_once(layout: Layout) -> None:
    """By one rank of those that compute the same loss; in a pipeline that is the last stage."""
    counting = [rank for rank in range(layout.world) if layout.counts(rank)]
    assert [layout.index(rank, "loss") for rank in counting] == list(range(layout.size("loss")))
    assert {layout.coordinate(rank, "pp") for rank in counting} == {layout.pp - 1}


def test_how_far_a_group_reaches() -> None:
    """In neighbours by rank number, which decides whether it leaves a node."""
    reaches = {"tp": 4, "cp": 8, "fsdp": 24, "dp_shard": 24, "dp_replicate": 48, "loss": 48, "pp": 96, "world": 96}
    assert {group: WHOLE.reach(group) for group in reaches} == reaches
    assert Layout(dp_shard=8).reach("dp_shard/2") == 2
    assert Layout(dp_shard=8, tp=2).reach("dp_shard/2") == 4


@pytest.mark.parametrize("group", [name for name in GROUPS if name not in ("stage", "world")])
@pytest.mark.parametrize("per_node", [1, 4, 8, 16, 32])
def test_groups_that_pass_through_a_node(group: str, per_node: int) -> None:
    """The most on any node, where nodes and groups are aligned."""
    layout = Layout(dp_replicate=2, dp_shard=4, cp=2, tp=2, ranks_per_node=per_node)
    places = [{rank // per_node for rank in ranks} for ranks in layout.members(group)]
    assert layout.groups_per_node(group) == max(
        sum(node in nodes for nodes in places) for node in range(32 // per_node)
    )


def test_a_plan_is_sharded_where_there_are_ranks_to_cut_over() -> None:
    assert Plan(Layout(dp_shard=2), shard=Shard("zero3")).sharded
    assert Plan(Layout(cp=2), shard=Shard("zero1")).sharded
    assert not Plan(Layout(dp_replicate=2)).sharded
    assert not Plan(Layout(tp=2), shard=Shard("zero3")).sharded
