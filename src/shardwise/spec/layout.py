"""The arrangement of the ranks: a degree for each axis of the mesh, and who forms a group with whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from math import gcd, isqrt, prod
from typing import Literal

from shardwise.spec.hash_once import hash_once

Axis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp", "ring", "ulysses", "expert_fsdp", "ep"]
MESH: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh order, outermost first: neighbours in rank number are neighbours on the last axes."""
EXPERT_MESH: tuple[Axis, ...] = ("pp", "dp_replicate", "expert_fsdp", "ep")
"""The same ranks as experts see them: dp_shard x cp x tp folded anew, so that neighbours have different experts."""
SEQUENCE_MESH: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp")
"""The same ranks as attention sees them under context parallelism: neighbours exchange heads; rings stand across."""
_ALONE: tuple[Axis, ...] = ("expert_fsdp", "ep", "pp", "dp_replicate", "dp_shard", "ulysses", "ring", "cp", "tp")
GROUPS: dict[str, tuple[Axis, ...]] = {
    "world": MESH,
    "stage": ("dp_replicate", "dp_shard", "cp", "tp"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
    "batch": ("dp_replicate", "dp_shard"),
    "fsdp": ("dp_shard", "cp"),
    "expert_loss": ("dp_replicate", "expert_fsdp"),
    **{axis: (axis,) for axis in _ALONE},
}
"""The axes along which the ranks of a group differ; each axis alone is a group of its name.

world   all ranks
stage   those with the same part of the model: each of its parameters is whole, or cut, among them
loss    those whose tokens differ: what is counted is counted once over them
batch   those that read different rows
fsdp    those over which a sharded strategy cuts the weights
cp      those that have different tokens of the same rows: ``ring`` x ``ulysses``
ep      those that have different experts, and together all of them
Of a weight of an expert the ranks of ``expert_loss`` have copies or pieces, and ``expert_fsdp`` is to it what ``fsdp``
is to the other weights. There are these three only where ``ep`` is larger than 1.
"""


@hash_once
@dataclass(frozen=True)
class Layout:
    """Degrees per axis. ``ranks_per_node`` says which ranks share a node (rank // ranks_per_node). ``v_shaped``: the
    stages of a pipeline go down its ranks and come back up, so that the first rank has both ends of the model.
    ``ulysses``: how many of the ``cp`` ranks exchange tokens for heads. A group is named as in ``GROUPS``;
    ``dp_shard/4`` means the 4 neighbours on that axis."""

    dp_replicate: int = 1
    dp_shard: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    ranks_per_node: int = 1
    v_shaped: bool = False
    ulysses: int = 1

    @property
    def world(self) -> int:
        return self.size("world")

    @property
    def dp(self) -> int:
        """Data-parallel ranks in all: those that see different samples."""
        return self.size("batch")

    @property
    def fsdp(self) -> int:
        """Ranks over which a sharded strategy cuts the weights."""
        return self.size("fsdp")

    @property
    def ring(self) -> int:
        """Ranks that keys and values go round, or are gathered from."""
        return self.cp // self.ulysses

    def degree(self, axis: Axis) -> int:
        return _expert_fsdp(self) if axis == "expert_fsdp" else self.ring if axis == "ring" else vars(self)[axis]

    def axes(self) -> tuple[tuple[Axis, int], ...]:
        """The axes larger than 1, in mesh order."""
        return tuple((axis, self.degree(axis)) for axis in _large(self, "world"))

    def coordinate(self, rank: int, axis: Axis) -> int:
        """Return where ``rank`` stands on ``axis``."""
        return rank // _stride(self, axis) % self.degree(axis)

    def rank(self, where: Mapping[Axis, int]) -> int:
        """The rank that stands there; first on the axes that are not named. All axes are of one mesh."""
        return sum(index * _stride(self, axis) for axis, index in where.items())

    def size(self, group: str) -> int:
        """Return how many ranks a group has."""
        known: dict[str, int] = vars(self).setdefault("_sizes", {})  # of no field: a search asks millions of times
        if group not in known:
            name, _, part = group.partition("/")
            known[group] = int(part) if part else prod(self.degree(axis) for axis in GROUPS[name])
        return known[group]

    def index(self, rank: int, group: str) -> int:
        """The number of ``rank`` within its group."""
        found = 0
        for axis in GROUPS[group]:
            found = found * self.degree(axis) + self.coordinate(rank, axis)
        return found

    def members(self, group: str) -> list[list[int]]:
        """The ranks of every group of this name."""
        found: dict[int, list[int]] = {}
        axes = [(_stride(self, axis), self.degree(axis)) for axis in GROUPS[group]]
        for rank in range(self.world):
            own = sum(rank // stride % degree * stride for stride, degree in axes)
            found.setdefault(rank - own, []).append(rank)
        return list(found.values())

    def counts(self, rank: int) -> bool:
        """Say whether a sum over the world takes tokens and losses from ``rank``: one of the ranks that compute the
        same loss, in the last stage."""
        return self.coordinate(rank, "pp") == last_stage_rank(self) and self.coordinate(rank, "tp") == 0

    def reach(self, group: str) -> int:
        """Return over how many neighbours in rank number a group extends."""
        known: dict[str, int] = vars(self).setdefault("_reaches", {})
        if group not in known:
            name, _, part = group.partition("/")
            outermost = GROUPS[name][0]
            known[group] = _stride(self, outermost) * (int(part) if part else self.degree(outermost))
        return known[group]

    def groups_per_node(self, group: str) -> int:
        """Return how many groups of this name have a rank on the same node."""
        stride = _stride(self, GROUPS[group.partition("/")[0]][-1])
        return min(self.ranks_per_node, stride) * max(1, self.ranks_per_node // self.reach(group))

    def called(self, group: str) -> str:
        """One name for all groups whose ranks differ along the same axes: the last in ``GROUPS``; of all ranks along
        several axes, the world. So what was asked for as ``fsdp`` is ``dp_shard`` where there is no cp."""
        return _called(self, group)


def mesh_axes(layout: Layout) -> tuple[tuple[str, int], ...]:
    """The axes larger than 1, in mesh order, where those over which weights are cut are one."""
    sizes = {name: layout.size(name) for name in ("pp", "dp_replicate", "fsdp", "tp")}
    return tuple((layout.called(name), size) for name, size in sizes.items() if size > 1)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a number from 1 on, the smallest first."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def least_dp_shard(layout: Layout) -> int:
    """Return the ``dp_shard`` of ddp, which shards nothing: as many ranks as ``ep`` needs beyond those of cp and tp."""
    return layout.ep // gcd(layout.ep, layout.cp * layout.tp)


def stage_rank(layout: Layout, stage: int) -> int:
    """Return the rank of a pipeline that has this stage: stages go round the ranks, or down and back up."""
    if not layout.v_shaped:
        return stage % layout.pp
    return stage if stage < layout.pp else 2 * layout.pp - 1 - stage


def last_stage_rank(layout: Layout) -> int:
    """Return the rank of a pipeline that has the output layer and the loss."""
    return 0 if layout.v_shaped else layout.pp - 1


def ends_of(layout: Layout) -> list[list[int]]:
    """Return the first and the last rank of every pipeline, which have the embedding and the output layer, unless the
    stages go down the ranks and back up."""
    return [[line[0], line[-1]] for line in layout.members("pp")]


def groups_of(layout: Layout) -> list[str]:
    """The names of the groups of more than one rank, those of experts only where these are spread."""
    spread = [name for name, axes in GROUPS.items() if layout.ep > 1 or axes[-1] not in EXPERT_MESH[2:]]
    return [name for name in spread if layout.size(name) > 1]


def _large(layout: Layout, group: str) -> list[Axis]:
    """The axes larger than 1 along which the ranks of a group differ; ``cp`` where it is a ring, or ulysses, alone."""
    whole: dict[Axis, Axis] = {"ring": "cp", "ulysses": "cp"}
    found = [axis for axis in GROUPS[group] if layout.degree(axis) > 1]
    return [whole.get(axis, axis) if layout.degree(axis) == layout.cp else axis for axis in found]


def _expert_fsdp(layout: Layout) -> int:
    """Ranks of a replica that have the same experts. Raises ValueError where ``ep`` does not divide its ranks."""
    ranks = layout.dp_shard * layout.cp * layout.tp
    if ranks % layout.ep:
        raise ValueError(f"ep {layout.ep} does not divide dp_shard x cp x tp = {ranks}")
    return ranks // layout.ep


def _stride(layout: Layout, axis: Axis) -> int:
    """Return how far neighbours on ``axis`` are apart in rank number."""
    mesh = next(mesh for mesh in (MESH, SEQUENCE_MESH, EXPERT_MESH) if axis in mesh)
    return prod(layout.degree(inner) for inner in mesh[mesh.index(axis) + 1 :])


@lru_cache(maxsize=1024)
def _called(layout: Layout, group: str) -> str:
    name, slash, part = group.partition("/")
    own = _large(layout, name)
    if name == "world" or (len(own) > 1 and own == _large(layout, "world")):
        return "world"
    return next(other for other in reversed(GROUPS) if _large(layout, other) == own) + slash + part


def missing(size: int, pieces: int) -> int:
    """Return how many are to be added to ``size`` until as many as that divide into so many pieces."""
    return -size % pieces


def cut(span: tuple[int, int], pieces: int, index: int) -> tuple[int, int]:
    """Piece ``index`` of the half-open range ``span`` cut in ``pieces``, as ``torch.chunk`` cuts."""
    start, stop = span
    length = -(-(stop - start) // pieces)
    return min(stop, start + index * length), min(stop, start + (index + 1) * length)
