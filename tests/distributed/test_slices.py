"""Which rows a rank holds of a weight that two axes of the mesh have cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardwise.distributed.meshes import meshes
from shardwise.distributed.slices import local, local_slice, replication
from shardwise.prove.pool import RankPool
from shardwise.spec.layout import Layout

TENSOR_PARALLEL, BOTH = Layout(dp_shard=2, tp=2), Layout(dp_replicate=2, tp=2)


def cut_twice(
    rank: int, world: int, layout: Layout, shape: tuple[int, int], dim: int
) -> tuple[list[tuple[int, int]], bool, int, float]:
    """A weight cut along ``dim`` by tensor parallelism and then by FSDP2: the ranges that this rank is said to hold,
    whether it holds them, on how many ranks each element is, and the sum of squares divided by that."""
    groups = meshes(layout, "cpu")
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float64).view(shape)
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(whole, groups.mesh("tp"), [Shard(dim)]))
    if layout.dp_shard > 1:
        fully_shard(module, mesh=groups.mesh("dp_shard"))
    held, ranges = local(module.weight.detach()), local_slice(module.weight)
    assert isinstance(module.weight, DTensor)
    copies = replication(module.weight, groups.size("stage"))
    squares = held.square().sum() / copies
    groups.sum(squares, "world")
    return [(at.start, at.stop) for at in ranges], torch.equal(held, whole[ranges]), copies, float(squares)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rows", [8, 6])
def test_rows_of_a_weight_that_is_cut_twice(ranks: RankPool, rows: int, dim: int) -> None:
    """FSDP2 cuts dim 0 of what tensor parallelism has left, so that the pieces of dim 0 lie tp first; 6 rows leave
    pieces of 2 and 1. Every element is held once."""
    answers = ranks.run(cut_twice, TENSOR_PARALLEL, (rows, 4), dim, world=4)
    assert all(right for _, right, _, _ in answers)
    assert {copies for *_, copies, _ in answers} == {1}
    assert {squares for *_, squares in answers} == {float(sum(n * n for n in range(rows * 4)))}
    if dim == 0 and rows == 8:
        assert [ranges[0] for ranges, *_ in answers] == [(0, 2), (4, 6), (2, 4), (6, 8)]


def test_a_weight_that_only_tensor_parallelism_cuts_has_its_copies(ranks: RankPool) -> None:
    """Two replicas of each half: its squares count once."""
    answers = ranks.run(cut_twice, BOTH, (6, 4), 0, world=4)
    assert all(right for _, right, _, _ in answers)
    assert {copies for *_, copies, _ in answers} == {2}
    assert {squares for *_, squares in answers} == {float(sum(n * n for n in range(24)))}
