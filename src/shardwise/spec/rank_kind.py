"""A kind of rank: what of the model such a rank holds, and where it stands on each axis.

Ranks differ: the first stage of a pipeline has the embedding, the last the output layer, and of a dim that does not
divide evenly the last ranks have less than the first, perhaps nothing. A plan is priced for one rank of each kind.
Along ``dp_replicate`` ranks are alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, product

from shardwise.spec.layout import Axis, Layout, cut, stage_rank


@dataclass(frozen=True)
class Stage:
    """A stage of a pipeline: its ``number``, in the order of the model, and its ``blocks``; ``embedding`` and ``head``
    as of a kind of rank."""

    number: int = 0
    blocks: range | tuple[int, ...] = ()
    embedding: bool = True
    head: bool = True


@dataclass(frozen=True)
class RankKind:
    """``rank`` is one of this kind; ``blocks`` are those that it holds, by their number in the whole model;
    ``embedding`` and ``head``: whether it has the embedding, and the last norm with the output layer and the loss.
    ``stages``: those of a pipeline that it holds; none where there is no pipeline."""

    layout: Layout = Layout()
    rank: int = 0
    blocks: range | tuple[int, ...] = ()
    embedding: bool = True
    head: bool = True
    stages: tuple[Stage, ...] = ()

    def coordinate(self, axis: Axis) -> int:
        """Return where the rank stands on ``axis``."""
        return self.layout.coordinate(self.rank, axis)

    def index(self, group: str) -> int:
        """Return the rank's number within its group."""
        return self.layout.index(self.rank, group)

    def part(self, size: int, group: str) -> tuple[int, int]:
        """The half-open range that it has of a dim of ``size``, cut over the ranks of ``group``."""
        ranks, index = _stands(self.layout, self.rank, group)
        return cut((0, size), ranks, index)

    def share(self, size: int, group: str) -> int:
        """The length of the largest part of a dim of ``size``, to which FSDP2 fills up all others."""
        return -(-size // _stands(self.layout, self.rank, group)[0])


@lru_cache(maxsize=1024)
def _stands(layout: Layout, rank: int, group: str) -> tuple[int, int]:
    """Return how many ranks a group has, and which of them this one is: asked for every weight of every plan."""
    return layout.size(group), layout.index(rank, group)


def stages_of(split: Sequence[int]) -> list[range]:
    """The blocks of each stage, of which ``split`` says how many there are."""
    ends = list(accumulate(split, initial=0))
    return [range(start, stop) for start, stop in pairwise(ends)]


def rank_kind_of(rank: int, layout: Layout, stages: Sequence[range | tuple[int, ...]]) -> RankKind:
    """The kind of rank that ``rank`` is. ``stages``: the blocks of each stage of the pipeline, one where there is none.
    Raises ValueError where the ranks of the pipeline cannot have as many each."""
    last = len(stages) - 1
    if len(stages) % layout.pp or (layout.pp == 1 and last) or (layout.v_shaped and last + 1 != 2 * layout.pp):
        raise ValueError(f"blocks are given for {len(stages)} stages, and the layout has {layout.pp} ranks for them")
    if layout.pp == 1:
        return RankKind(layout, rank, stages[0])
    mine = layout.coordinate(rank, "pp")
    own = tuple(
        Stage(number, blocks, number == 0, number == last)
        for number, blocks in enumerate(stages)
        if stage_rank(layout, number) == mine
    )
    blocks = tuple(block for stage in own for block in stage.blocks)
    ends = any(stage.embedding for stage in own), any(stage.head for stage in own)
    return RankKind(layout, rank, blocks, *ends, own)


def rank_kinds(
    layout: Layout,
    stages: Sequence[range | tuple[int, ...]],
    cuts: Mapping[str, Collection[int]],
    *,
    every_stage: bool = False,
) -> list[RankKind]:
    """The kinds of rank, rank 0's first: of the stages (if not of ``every_stage``), and of each group over which dims
    are cut, the first, a middle one and the last, but of ranks whose parts are as large one. ``cuts``: the sizes of the
    dims that are cut over a group, by its name (``fsdp``, ``tp``). So of a ring, whose ranks see others before them and
    behind them."""
    found = []
    shards = sorted({*_kinds(layout, "fsdp", cuts), *(layout.ulysses * index for index in _ends(layout.ring))})
    of_stages = range(layout.pp) if every_stage else _ends(layout.pp)
    for stage, shard, tensor in product(of_stages, shards, _kinds(layout, "tp", cuts)):
        where: dict[Axis, int] = {"pp": stage, "dp_shard": shard // layout.cp, "cp": shard % layout.cp, "tp": tensor}
        found.append(rank_kind_of(layout.rank(where), layout, stages))
    return found


def _kinds(layout: Layout, group: str, cuts: Mapping[str, Collection[int]]) -> list[int]:
    ranks, found = layout.size(group), dict[tuple[int, ...], int]()
    for index in _ends(ranks):
        parts = (cut((0, size), ranks, index) for size in cuts.get(group, ()))
        found.setdefault(tuple(stop - start for start, stop in parts), index)
    return list(found.values())


def _ends(ranks: int) -> list[int]:
    """The first, a middle one and the last of so many, each once."""
    return sorted({0, ranks // 2, ranks - 1})
