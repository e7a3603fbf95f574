"""The table of schedules of pipelines: the shape of each, what it asks for and how much of it is alive. A schedule is a
row of ``PIPELINES``, and the function of techniques/pp/schedule_orders.py that the row names, which rows may share;
nobody else asks for its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

Alive = Callable[[int, int, int], int]
"""(ranks, the rank, its number of stages) -> a number of forwards."""


@dataclass(frozen=True)
class PipelineSpec:
    """Facts of a schedule. ``shape`` says which rank has a stage: in a loop stage ``s`` is on rank ``s % ranks``; a V
    goes down the ranks and back up. ``most_stages`` None: a rank may have any number. ``alive``: so many forwards at
    most has a rank done whose gradients are not; None: all of a step's, of which backward comes after the last.
    ``turns``: the function that makes its order. ``hop``: of a loop, how many forwards more a rank does first for each
    rank that follows it. ``tried``: with so many stages a rank a search tries it where nothing is pinned."""

    shape: Literal["loop", "v"]
    splits_backward: bool
    least_stages: int
    most_stages: int | None
    least_micro_batches_per_rank: int
    alive: Alive | None
    turns: str = "looped"
    hop: int = 1
    tried: tuple[int, ...] = ()

    def least_micro_batches(self, ranks: int) -> int:
        """The fewest micro-batches of a step."""
        return max(1, self.least_micro_batches_per_rank * ranks)

    def most_alive(self, ranks: int, rank: int, stages: int, micro_batches: int) -> int:
        """Return how many forwards at most a rank with so many stages has done whose gradients are not."""
        whole = micro_batches * stages
        return whole if self.alive is None else min(whole, self.alive(ranks, rank, stages))


PIPELINES = {
    "gpipe": PipelineSpec("loop", False, 1, 1, 0, None),
    "1f1b": PipelineSpec("loop", False, 1, 1, 1, lambda ranks, rank, stages: ranks - rank, tried=(1,)),
    "interleaved": PipelineSpec(
        *("loop", False, 2, None, 1),
        lambda ranks, rank, stages: (stages - 1) * ranks + 2 * (ranks - 1 - rank) + 1,
        hop=2,
        tried=(2, 4),
    ),
    "interleaved_zb": PipelineSpec("loop", True, 1, None, 1, lambda ranks, rank, stages: stages * ranks),
    "zbv": PipelineSpec("v", True, 2, 2, 1, lambda ranks, rank, stages: 2 * ranks, "zbv", tried=(2,)),
    "dualpipev": PipelineSpec("v", True, 2, 2, 2, lambda ranks, rank, stages: 2 * ranks + 1, "dualpipev"),
    "looped_bfs": PipelineSpec("loop", False, 2, None, 0, None),
}
"""All schedules by name."""
if TYPE_CHECKING:
    ScheduleName: TypeAlias = str
else:  # what recipes and plans may say, and their schema, follow from the table
    ScheduleName = Literal[tuple(PIPELINES)]
