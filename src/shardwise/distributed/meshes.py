"""Every process group of a run, made once from its layout, by name (spec/layout.py says which there are)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.spec.layout import EXPERT_MESH, Layout, ends_of, groups_of, mesh_axes
from shardwise.spec.rows import RowShare


@dataclass(frozen=True)
class Meshes:
    """The process groups of this ``rank``, by name. A group of one rank is left out, and asking for it is an error.
    Of a pipeline there is ``ends`` too, its first and its last rank, and ``channels``: one for each direction between
    two neighbours, by the sender's number and the receiver's within it. ``expert_axes``: this rank's stage as experts
    see it, where ranks have different ones. Without arguments: those of a process on its own."""

    layout: Layout = Layout()
    rank: int = 0
    axes: DeviceMesh | None = None
    expert_axes: DeviceMesh | None = None
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    channels: Mapping[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        """Return whether this rank contributes its tokens and losses to a sum over the world."""
        return self.layout.counts(self.rank)

    @property
    def row_share(self) -> RowShare:
        """The tokens that this rank has of each row."""
        return RowShare(self.layout.ring, self.layout.ulysses, self.index("cp"))

    def size(self, group: str) -> int:
        """The number of ranks in this rank's ``group``."""
        return self.layout.size(group)

    def index(self, group: str) -> int:
        """The number of this rank within its ``group``."""
        return self.layout.index(self.rank, group)

    def sum(self, numbers: Tensor, group: str) -> None:
        """Sum ``numbers`` over the ranks of ``group``, in place; one rank sends nothing."""
        if self.size(group) > 1:
            dist.all_reduce(numbers, group=self.groups[group])

    def largest(self, numbers: Tensor, group: str) -> None:
        """Take the largest of each of ``numbers`` over the ranks of ``group``, in place."""
        if self.size(group) > 1:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.groups[group])

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

    def called(self) -> dict[str, str]:
        """Return what the layout calls each process group, by the group's own name."""
        groups = self.groups.items()
        named = {str(group.group_name): "pp" if name == "ends" else self.layout.called(name) for name, group in groups}
        return named | {str(channel.group_name): "pp" for channel in self.channels.values()}

    def mesh(self, *groups: str) -> DeviceMesh:
        """The part of the device mesh along those of ``groups`` that are larger than 1: ``pp``, ``dp_replicate``,
        ``fsdp``, ``tp``."""
        assert self.axes is not None
        return self.axes[tuple(self.layout.called(group) for group in groups if self.size(group) > 1)]

    def expert_mesh(self, *groups: str) -> DeviceMesh:
        """Return the part of the experts' device mesh along those of ``groups`` that it has: ``dp_replicate`` where
        that is larger than 1, ``expert_fsdp`` and ``ep``."""
        assert self.expert_axes is not None and self.expert_axes.mesh_dim_names is not None
        return self.expert_axes[tuple(group for group in groups if group in self.expert_axes.mesh_dim_names)]


def meshes(layout: Layout, kind: str, timeout: timedelta | None = None) -> Meshes:
    """The groups of ``layout`` on devices of ``kind``, over the ranks of the default process group: every rank calls
    this alike. ``timeout``: of a pipeline's channels, which gloo asks for when they are made."""
    if layout.world == 1:
        return Meshes(layout)
    large = mesh_axes(layout)
    axes = init_device_mesh(kind, tuple(size for _, size in large), mesh_dim_names=tuple(axis for axis, _ in large))
    assert dist.group.WORLD is not None
    groups = {"world": dist.group.WORLD} | {axis: axes.get_group(axis) for axis, _ in large}
    for name in groups_of(layout):
        alike = layout.called(name)
        if alike not in groups and layout.size(name) == layout.world and name != "ep":  # what it sends is told apart
            groups[alike] = groups["world"]
        elif alike not in groups:
            groups[alike] = dist.new_subgroups_by_enumeration(layout.members(name))[0]
        groups[name] = groups[alike]
    if layout.pp > 1:
        ends, _ = dist.new_subgroups_by_enumeration(ends_of(layout))
        groups |= {"ends": ends} if ends is not None else {}
    expert_axes = _expert_axes(layout, kind, groups) if layout.ep > 1 else None
    return Meshes(layout, dist.get_rank(), axes, expert_axes, groups, _channels(layout, kind, timeout))


def _expert_axes(layout: Layout, kind: str, groups: Mapping[str, dist.ProcessGroup]) -> DeviceMesh:
    """The ranks of this rank's stage, arranged along the axes of ``EXPERT_MESH``: FSDP2 cuts what ``ep`` has cut
    already only where both are axes of one mesh."""
    axes = EXPERT_MESH[1:] if layout.dp_replicate > 1 else EXPERT_MESH[2:]
    sizes = {axis: layout.degree(axis) for axis in axes}
    alone = dist.new_subgroups_by_enumeration([[rank] for rank in range(layout.world)])[0]
    stage = next(ranks for ranks in layout.members("stage") if dist.get_rank() in ranks)
    of_axes = [alone if size == 1 else groups[axis] for axis, size in sizes.items()]
    ranks = torch.tensor(stage).view(*sizes.values())
    return DeviceMesh.from_group([g for g in of_axes if g is not None], kind, ranks, mesh_dim_names=(*sizes,))


def _channels(layout: Layout, kind: str, timeout: timedelta | None) -> dict[tuple[int, int], dist.ProcessGroup]:
    """A communicator for each direction between neighbours of a pipeline, the last and the first included. All ranks
    make all of them in one order, and on GPUs connect them at once: NCCL connects two ranks when they first talk, and
    ranks that come to that in different orders wait for one another."""
    found: dict[tuple[int, int], dist.ProcessGroup] = {}
    lines = layout.members("pp")
    ranks = layout.pp
    me = dist.get_rank()
    pairs = {pair for one in range(ranks) for pair in ((one, (one + 1) % ranks), ((one + 1) % ranks, one))}
    for source, target in sorted(pairs if ranks > 1 else ()):
        for line in lines:
            members = [line[source], line[target]]
            group = dist.new_group(members, timeout)
            if me in members:
                found[source, target] = group
                if kind == "cuda":
                    one = torch.zeros(1, device="cuda")
                    first = me == members[0]
                    dist.send(one, members[1], group) if first else dist.recv(one, members[0], group)
    return found
