"""Who stands where, and in which group with whom, on all five axes."""

from __future__ import annotations

from itertools import product

import pytest

from shardwise.spec.layout import GROUPS, Layout, divisors, mesh_axes
from shardwise.spec.plan import Plan, Shard

WHOLE = Layout(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=4, ranks_per_node=8)
EXPERTS = Layout(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=4, ranks_per_node=8)
NESTED = Layout(dp_shard=2, cp=8, tp=2, ulysses=4, ranks_per_node=8)
LAYOUTS = [Layout(), Layout(dp_shard=4), Layout(dp_replicate=2, dp_shard=2), Layout(dp_shard=3, tp=2), WHOLE, EXPERTS]
LAYOUTS += [NESTED]


def test_ranks_are_numbered_with_tp_innermost() -> None:
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    places = product(*(range(WHOLE.degree(axis)) for axis in axes))  # type: ignore[arg-type]
    for rank, place in enumerate(places):
        assert tuple(WHOLE.coordinate(rank, axis) for axis in axes) == place  # type: ignore[arg-type]
    assert WHOLE.world == 96


def enumerated(layout: Layout) -> dict[int, dict[str, int]]:
    """Where every rank stands, by brute force: counted up along the mesh, and again along that of the experts."""
    inner = layout.dp_shard * layout.cp * layout.tp
    found: dict[int, dict[str, int]] = {}
    outer = list(product(range(layout.pp), range(layout.dp_replicate)))
    places = product(outer, range(layout.dp_shard), range(layout.cp), range(layout.tp))
    experts = product(outer, range(inner // layout.ep), range(layout.ep))
    for rank, ((stage, replica), shard, sequence, tensor) in enumerate(places):
        found[rank] = {"pp": stage, "dp_replicate": replica, "dp_shard": shard, "cp": sequence, "tp": tensor}
    for rank, (_, copy, expert) in enumerate(experts):
        found[rank] |= {"expert_fsdp": copy, "ep": expert}
    folded = product(outer, range(layout.dp_shard), range(layout.ring), range(layout.ulysses), range(layout.tp))
    for rank, (_, _, across, within, _) in enumerate(folded):
        found[rank] |= {"ring": across, "ulysses": within}
    return found


DENSE, RINGS, SPREAD = ("pp", "dp_replicate", "dp_shard", "cp", "tp"), ("ring", "ulysses"), ("expert_fsdp", "ep")
SHAPES = list(product((1, 2), (1, 2), (1, 2, 3), (1, 2), (1, 4), (1, 2, 3, 8), (1,)))
SHAPES += list(product((1, 2), (1,), (1, 2), (4,), (1, 2), (1,), (1, 2, 4)))


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[2] * s[3] * s[4] % s[5] == 0])
def test_every_question_about_ranks_is_answered_as_enumeration_answers_it(shape: tuple[int, ...]) -> None:
    """Coordinates, indices, members and reaches of every group, those of experts and of attention among them."""
    layout = Layout(**dict(zip((*DENSE, "ep", "ulysses"), shape, strict=True)))
    where = enumerated(layout)
    assert len(where) == layout.world
    for rank, at in where.items():
        assert {axis: layout.coordinate(rank, axis) for axis in at} == at  # type: ignore[arg-type]
        dense = {axis: index for axis, index in at.items() if axis in DENSE}
        assert layout.rank(dense) == rank  # type: ignore[arg-type]
    for group, axes in GROUPS.items():
        inner = SPREAD if {*SPREAD} & {*axes} else ("dp_shard", *RINGS, "tp") if {*RINGS} & {*axes} else DENSE[2:]
        mesh = ("pp", "dp_replicate", *inner)
        others = [axis for axis in mesh if axis not in axes]
        alike: dict[tuple[int, ...], list[int]] = {}
        for rank, at in where.items():
            alike.setdefault(tuple(at[axis] for axis in others), []).append(rank)
        assert layout.members(group) == list(alike.values())
        assert {len(ranks) for ranks in alike.values()} == {layout.size(group)}
        assert all(layout.index(rank, group) == ranks.index(rank) for ranks in alike.values() for rank in ranks)
        assert layout.reach(group) >= max(ranks[-1] - ranks[0] + 1 for ranks in alike.values())


def test_rings_stand_across_neighbours_that_exchange_heads() -> None:
    """Eight ranks with the same rows, of which four neighbours exchange heads: rings of two, one for each of them."""
    assert NESTED.members("ulysses")[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert NESTED.members("ring")[:2] == [[0, 8], [1, 9]]
    assert [NESTED.called(group) for group in ("ring", "ulysses", "cp", "fsdp")] == ["ring", "ulysses", "cp", "fsdp"]
    assert {Layout(cp=4).called(group) for group in ("ring", "cp", "fsdp")} == {"cp"}
    assert Layout(cp=4, ulysses=4, tp=2).called("ulysses") == "cp"
    assert mesh_axes(NESTED) == (("fsdp", 16), ("tp", 2))


def test_experts_are_spread_over_neighbours() -> None:
    """Sixteen ranks of two replicas hold eight experts' shares: each group of four neighbours holds all."""
    layout = Layout(dp_replicate=2, dp_shard=4, tp=2, ep=4)
    assert layout.members("ep") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert layout.members("expert_fsdp")[:2] == [[0, 4], [1, 5]]
    assert layout.members("expert_loss")[0] == [0, 4, 8, 12]
    assert [layout.coordinate(rank, "ep") for rank in (0, 1, 5, 15)] == [0, 1, 1, 3]


def test_experts_must_divide_the_ranks_of_a_replica() -> None:
    with pytest.raises(ValueError, match="ep 3 "):
        Layout(dp_shard=4, ep=3).size("expert_fsdp")


def test_groups_along_the_same_axes_have_one_name() -> None:
    assert [Layout(dp_shard=8).called(group) for group in ("fsdp", "loss", "batch")] == ["dp_shard"] * 3
    assert [Layout(dp_replicate=8, tp=2).called(group) for group in ("loss", "batch")] == ["dp_replicate"] * 2
    assert Layout(dp_shard=8, cp=2, tp=2).called("fsdp/4") == "fsdp/4"
    assert Layout(dp_replicate=2, dp_shard=8).called("loss") == "world"
    assert Layout(dp_shard=8).called("fsdp/4") == "dp_shard/4"
    assert [WHOLE.called(group) for group in ("world", "stage", "loss", "batch", "tp")] == [
        "world",
        "stage",
        "loss",
        "batch",
        "tp",
    ]


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


@pytest.mark.parametrize("group", [name for name in GROUPS if name not in ("stage", "world")])  # experts: ep 1
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


def test_divisors_are_those_that_a_search_through_all_numbers_finds() -> None:
    for number in (*range(1, 50), 360, 1024, 997):
        assert list(divisors(number)) == [n for n in range(1, number + 1) if number % n == 0]
    assert len(divisors(2**20)) == 21 and divisors(1_000_003) == (1, 1_000_003)
