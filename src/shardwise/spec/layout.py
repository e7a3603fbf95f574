"""How the ranks are arranged: a degree for each axis of the mesh."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

Axis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"]
AXES: tuple[Axis, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
"""Mesh order, outermost first: neighbours in rank number are neighbours on the last axes."""


@dataclass(frozen=True)
class Layout:
    """Degrees per axis. ``ranks_per_node`` says which ranks share a node (rank // ranks_per_node)."""

    dp_replicate: int = 1
    dp_shard: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    ranks_per_node: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Data-parallel ranks in all: those that see different samples."""
        return self.dp_replicate * self.dp_shard

    def degree(self, axis: Axis) -> int:
        degree: int = vars(self)[axis]
        return degree

    def axes(self) -> tuple[tuple[Axis, int], ...]:
        """The axes larger than 1, in mesh order."""
        return tuple((axis, self.degree(axis)) for axis in AXES if axis != "ep" and self.degree(axis) > 1)

    def coordinate(self, rank: int, axis: Axis) -> int:
        """Where ``rank`` stands on ``axis``."""
        inner = prod(self.degree(a) for a in AXES[AXES.index(axis) + 1 :] if a != "ep")
        return rank // inner % self.degree(axis)

    def dp_rank(self, rank: int) -> int:
        """The index of ``rank`` among the data-parallel ranks: which share of a batch it reads."""
        return self.coordinate(rank, "dp_replicate") * self.dp_shard + self.coordinate(rank, "dp_shard")
