"""Every process group of a run, made once from its layout, by name (spec/layout.py says which there are)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.spec.layout import GROUPS, Layout


@dataclass(frozen=True)
class Meshes:
    """The process groups of this ``rank``, by name. A group of one rank is left out, and asking for it is an error.
    Without arguments: those of a process on its own."""

    layout: Layout = Layout()
    rank: int = 0
    axes: DeviceMesh | None = None
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        """Whether this rank contributes its tokens and losses to a sum over the world."""
        return self.layout.counts(self.rank)

    def size(self, group: str) -> int:
        """The number of ranks in this rank's group ``name``."""
        return self.layout.size(group)

    def index(self, group: str) -> int:
        """The number of this rank within its group."""
        return self.layout.index(self.rank, group)

    def sum(self, numbers: Tensor, group: str) -> None:
        """Sum ``numbers`` over the ranks of ``group``, in place; one rank sends nothing."""
        if self.size(group) > 1:
            dist.all_reduce(numbers, group=self.groups[group])

    def broadcast(self, tensor: Tensor, group: str) -> None:
        """Broadcast the ``tensor`` of the group's first rank, in place."""
        if self.size(group) > 1:
            dist.broadcast(tensor, group=self.groups[group], group_src=0)

    def total(self, numbers: Tensor) -> None:
        """Sum numbers that come from tokens over the world, in place. Of ranks that compute the same loss, one
        counts."""
        if not self.counts:
            numbers.zero_()
        self.sum(numbers, "world")

    def axis_names(self) -> dict[str, str]:
        """From the names of process groups to their axes."""
        return {str(self.groups[axis].group_name): axis for axis, _ in self.layout.axes()}

    def mesh(self, *axes: str) -> DeviceMesh:
        """The part of the device mesh along those of ``axes`` that are larger than 1."""
        assert self.axes is not None
        return self.axes[tuple(axis for axis in axes if self.size(axis) > 1)]


def meshes(layout: Layout, kind: str) -> Meshes:
    """The groups of ``layout`` on devices of ``kind``, over the ranks of the default process group: every rank calls
    this alike."""
    if layout.world == 1:
        return Meshes(layout)
    large = layout.axes()
    axes = init_device_mesh(kind, tuple(size for _, size in large), mesh_dim_names=tuple(axis for axis, _ in large))
    assert dist.group.WORLD is not None
    groups = {axis: axes.get_group(axis) for axis, _ in large} | {"world": dist.group.WORLD}
    for name, along in GROUPS.items():
        differ = [axis for axis, _ in large if axis in along]
        if name in groups or not differ:
            continue
        if len(differ) == 1:
            groups[name] = groups[differ[0]]
        elif len(differ) == len(large):
            groups[name] = groups["world"]
        else:
            groups[name] = dist.new_subgroups_by_enumeration(layout.members(name))[0]
    return Meshes(layout, dist.get_rank(), axes, groups)
