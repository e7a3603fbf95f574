"""Measurements of what the ranks send one another, by the runtime's collectives, in the sizes that a step has."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from shardwise.distributed.collectives import scattered, stacked
from shardwise.distributed.meshes import Meshes
from shardwise.launch.doctor.stopwatch import Clock, Work
from shardwise.spec.measured import Sent

SIZES = {
    "cpu": tuple(2**power for power in (12, 14, 16, 18, 20, 22, 24)),
    "cuda": tuple(2**power for power in (12, 14, 16, 18, 20, 22, 24, 26, 28)),
}
KINDS = ("all_reduce", "all_gather", "reduce_scatter")


def collectives(clock: Clock, meshes: Meshes) -> Iterator[Sent]:
    """Each kind of each size over all ranks; of several nodes, also over those of a node."""
    layout = meshes.layout
    nodes = layout.world // layout.ranks_per_node
    groups = {"world": nodes > 1} | ({"dp_shard": False} if nodes > 1 else {})
    for name, across in groups.items():
        ranks = layout.size(name)
        for kind in KINDS if ranks > 1 else ():
            for size in SIZES[clock.device.type]:
                exact = size // (4 * ranks) * 4 * ranks
                work = _work(kind, meshes.groups[name], exact // 4, clock.device)
                yield Sent(kind, ranks, across, exact, clock.seconds(work))


def _work(kind: str, group: dist.ProcessGroup, count: int, device: torch.device) -> Work:
    ranks = dist.get_world_size(group)
    whole = torch.zeros(ranks, count // ranks, device=device)
    part = torch.zeros(count // ranks, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "all_gather":
        return lambda: stacked(part, group)
    return lambda: scattered(whole, group)
