"""The order of computations on a rank of a pipeline, a function for each kind of schedule: named by the rows of
spec/pipelines.py, called with a row and a rank's place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from shardwise.spec.pipelines import PipelineSpec

Computed = Literal["F", "B", "I", "W"]
COMPUTATIONS: tuple[Computed, ...] = ("F", "B", "I", "W")
ANY = -1
"""In place of a stage: whichever has waited longest."""
Turn = tuple[Computed, int]
"""(kind, stage) of a computation whose micro-batch follows from those before it; the stage of a W may be ANY."""


class Corner(NamedTuple):
    """A rank of a pipeline in a step."""

    rank: int
    ranks: int
    stages_per_rank: int
    micro_batches: int


def turns(spec: PipelineSpec, at: Corner) -> list[Turn]:
    """Return what the rank computes, in order, under the schedule of this row."""
    order: list[Turn] = globals()[spec.turns](spec, at)
    return order


def rounds_of(spec: PipelineSpec, ranks: int, micro_batches: int) -> list[int]:
    """Return how many micro-batches go through a rank's stages together, round after round."""
    count = 1 if spec.alive is None else max(1, micro_batches // ranks)
    return [micro_batches // count + (i < micro_batches % count) for i in range(count)]


def looped(spec: PipelineSpec, at: Corner) -> list[Turn]:
    """Some forwards, then one forward and one backward by turns, then the backwards that are left. Micro-batches go
    through a rank's stages in rounds, as even as can be, the larger first.

    GPipe: arXiv 1811.06965. 1F1B and interleaved: Narayanan et al., arXiv 2104.04473, section 2.2. Zero bubble, where
    the W of a rank lag so many I behind as there are ranks before it: Qi et al., arXiv 2401.10241, ZB-H1.
    """
    rank, ranks, stages_per_rank, micro_batches = at
    splits, stages = spec.splits_backward, range(rank, ranks * stages_per_rank, ranks)
    rounds = rounds_of(spec, ranks, micro_batches)
    backward: Computed = "I" if splits else "B"
    forwards: list[Turn] = [("F", stage) for size in rounds for stage in stages for _ in range(size)]
    backwards = [(backward, stage) for size in rounds for stage in reversed(stages) for _ in range(size)]
    lead = len(forwards)
    if spec.alive is not None:
        lead = min(lead, (stages_per_rank - 1) * rounds[0] + spec.hop * (ranks - 1 - rank))
    turns = forwards[:lead]
    for place, turn in enumerate(backwards):
        turns += [*forwards[lead + place : lead + place + 1], turn]
        if splits and place >= rank:
            turns.append(("W", ANY))
    return turns + [("W", ANY)] * (rank if splits else 0)


Phase = tuple[int, str]
"""How many times a rank of a V does some computations. ``F0``: of its stage on the way down; ``F1``: of that on the way
up; ``W``: of whichever has waited longest."""


def _v_shaped(rank: int, ranks: int, phases: Iterable[Phase]) -> list[Turn]:
    stages, kinds = {"0": rank, "1": 2 * ranks - 1 - rank, "": ANY}, {str(kind): kind for kind in COMPUTATIONS}
    return [
        (kinds[letters[0]], stages[letters[1:]])
        for times, steps in phases
        for _ in range(times)
        for letters in steps.split()
    ]


def zbv(spec: PipelineSpec, at: Corner) -> list[Turn]:
    """ZB-V: Qi et al., arXiv 2401.10241, section 6, and arXiv 2405.15362. It has at least as many micro-batches as fill
    the pipeline; of a step with fewer, the caller leaves out the rest."""
    rank, ranks, _, micro_batches = at
    left, whole = ranks - rank, max(2 * ranks - 1, micro_batches)
    phases = [
        (2 * left - 1, "F0"),
        (rank, "F1 F0"),
        (left, "F1 I1 W1"),
        (whole - ranks - left + 1, "F0 I0 W0 F1 I1 W1"),
        (left - 1, "I0 W0 F1 I1 W1"),
        (rank, "I0 I1"),
        (left, "I0 W0"),
        (rank, "W1"),
        (rank, "W0"),
    ]
    return _v_shaped(rank, ranks, phases)


def dualpipev(spec: PipelineSpec, at: Corner) -> list[Turn]:
    """DualPipeV, the half of DualPipe that is a V: DeepSeek-V3, arXiv 2412.19437, github.com/deepseek-ai/DualPipe. A
    forward and a backward that may overlap stand side by side. Of the last backwards half are whole, half in parts."""
    rank, ranks, _, micro_batches = at
    after = ranks - 1 - rank
    half, odd = divmod(rank + 1, 2)
    phases = [
        (2 * after, "F0"),
        (rank + 1, "F0 F1"),
        (after, "I1 W F1"),
        (micro_batches - ranks - after, "F0 B1 F1 B0"),
        (after, "B1 F1 B0"),
        (half, "B1 B0"),
        (odd, "B1 I0"),
        (half, "I1 I0"),
        (after, "W I0"),
        (rank + 1, "W"),
    ]
    return _v_shaped(rank, ranks, phases)
