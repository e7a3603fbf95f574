"""A place: a kind of rank. What of the model such a rank holds, and where it stands on each axis.

Ranks differ: the first stage of a pipeline has the embedding, the last the output layer, and of a dim that does not
divide evenly the last ranks have less than the first, perhaps nothing. A plan is told at one rank of each kind. Along
``dp_replicate`` ranks are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from shardwise.spec.layout import Axis, Layout, cut

DIFFERING: tuple[Axis, ...] = ("pp", "dp_shard", "cp", "tp")
"""The axes along which ranks differ in what they hold."""


@dataclass(frozen=True)
class Place:
    """``rank`` is one of this kind; ``blocks`` are those that it holds, by their number in the whole model; ``stem``
    and ``head``: whether it has the embedding, and the last norm with the output layer and the loss."""

    layout: Layout = Layout()
    rank: int = 0
    blocks: tuple[int, ...] = ()
    stem: bool = True
    head: bool = True

    def coordinate(self, axis: Axis) -> int:
        """Where it stands on ``axis``."""
        return self.layout.coordinate(self.rank, axis)

    def index(self, group: str) -> int:
        """Its number within its group."""
        return self.layout.index(self.rank, group)

    def part(self, size: int, group: str) -> tuple[int, int]:
        """The half-open range that it has of a dim of ``size``, cut over the ranks of ``group``."""
        return cut((0, size), self.layout.size(group), self.index(group))


def place_of(rank: int, layout: Layout, stages: Sequence[Sequence[int]]) -> Place:
    """The place of ``rank``. ``stages``: the blocks of each stage of the pipeline, one where there is none. Raises
    ValueError where that is not as many as the layout has."""
    if len(stages) != layout.pp:
        raise ValueError(f"blocks are given for {len(stages)} stages, and the layout has {layout.pp}")
    stage = layout.coordinate(rank, "pp")
    return Place(layout, rank, tuple(stages[stage]), stage == 0, stage == layout.pp - 1)


def places(layout: Layout, stages: Sequence[Sequence[int]]) -> list[Place]:
    """The kinds of rank, rank 0's first: on each axis along which they differ the first, a middle one and the last."""
    kinds = product(*(_ends(layout.degree(axis)) for axis in DIFFERING))
    return [place_of(layout.rank(dict(zip(DIFFERING, where, strict=True))), layout, stages) for where in kinds]


def _ends(degree: int) -> list[int]:
    """The first, a middle one and the last of so many, each once."""
    return sorted({0, degree // 2, degree - 1})
