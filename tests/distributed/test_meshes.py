"""Every group of a run by name, and what is summed over it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwise.distributed.fake_world import fake_world
from shardwise.distributed.meshes import Meshes, meshes
from shardwise.prove.pool import RankPool
from shardwise.spec.layout import GROUPS, Layout, groups_of

TP, HYBRID = Layout(dp_shard=2, tp=2), Layout(dp_replicate=2, dp_shard=2)


def sums(rank: int, world: int, layout: Layout) -> tuple[dict[str, list[int]], int, int]:
    """For each name the ranks that this one sums with; a sum of its rows' number, 10 and up, over all that count; and
    its number among those that read different rows."""
    groups, found = meshes(layout, "cpu"), {}
    for name in [name for name in GROUPS if layout.size(name) == 1 or name in groups_of(layout)]:
        bits = torch.tensor(2**rank)
        groups.sum(bits, name)
        found[name] = [other for other in range(world) if int(bits) >> other & 1]
    tokens = torch.tensor(10 + groups.index("batch"))
    groups.total(tokens)
    return found, int(tokens), groups.index("batch")


@pytest.mark.parametrize(
    "layout",
    [TP, HYBRID, Layout(pp=2, tp=2), Layout(dp_replicate=4), Layout(cp=2, tp=2), Layout(dp_shard=2, tp=2, ep=2)],
    ids=str,
)
def test_a_group_is_the_ranks_that_the_layout_says(ranks: RankPool, layout: Layout) -> None:
    answers = ranks.run(sums, layout, world=4)
    for rank, (found, total, index) in enumerate(answers):
        assert {*groups_of(layout)} <= {*found}
        for name in found:
            assert found[name] == next(members for members in layout.members(name) if rank in members), name
        assert index == layout.index(rank, "batch")
        counting = [other for other in range(4) if layout.counts(other)]
        assert total == sum(10 + layout.index(other, "batch") for other in counting)


def test_groups_of_several_axes_within_others_are_made() -> None:
    """Of eight ranks in three axes, those that read different rows: neither an axis nor the world."""
    layout = Layout(dp_replicate=2, dp_shard=2, tp=2)
    with fake_world(layout, rank=3) as groups:
        assert dist.get_process_group_ranks(groups.groups["batch"]) == [1, 3, 5, 7]
        assert groups.groups["loss"] is not groups.groups["world"]
        assert dist.get_process_group_ranks(groups.groups["fsdp"]) == [1, 3]


def test_groups_of_experts_are_made_where_experts_are_spread() -> None:
    with fake_world(Layout(dp_replicate=2, dp_shard=4, tp=2, ep=4), rank=6) as groups:
        members = {name: dist.get_process_group_ranks(groups.groups[name]) for name in ("ep", "expert_fsdp")}
        assert members == {"ep": [4, 5, 6, 7], "expert_fsdp": [2, 6]}
        assert dist.get_process_group_ranks(groups.groups["expert_loss"]) == [2, 6, 10, 14]
    with fake_world(Layout(dp_shard=4)) as groups:
        assert not {"ep", "expert_fsdp", "expert_loss"} & {*groups.groups}


def test_a_process_group_is_called_as_the_layout_calls_it() -> None:
    """Whatever it was asked for as."""
    with fake_world(Layout(dp_replicate=2, dp_shard=2, tp=2)) as groups:
        names = {name: groups.called()[str(group.group_name)] for name, group in groups.groups.items()}
    assert names["fsdp"] == "dp_shard" and names["loss"] == "batch" and names["world"] == "world"


def test_there_is_no_group_of_one() -> None:
    """What asks for one is wrong, and is not given the world instead."""
    with fake_world(Layout(dp_shard=2)) as groups, pytest.raises(KeyError):
        groups.groups["tp"]
    assert Meshes().size("world") == 1 and Meshes().counts
