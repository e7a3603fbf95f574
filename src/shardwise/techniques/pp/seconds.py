"""The seconds of a step of a pipeline: the list of actions is replayed with what the passes of its stages take.

Of many micro-batches some are replayed, a round of as many as there are ranks less each time, until a round more takes
as long as the round before it: all others do too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from shardwise.spec.layout import stage_rank
from shardwise.spec.plan import Plan
from shardwise.spec.rank_kind import stages_of
from shardwise.spec.sheet import Sheet
from shardwise.techniques.between import StageTimes
from shardwise.techniques.pp import orders
from shardwise.techniques.pp.compiled import Computation, Program, program
from shardwise.techniques.pp.replay import Replay, Timed

ROUNDS = 4
"""Of so many rounds a replay is compared with those of one round and of two rounds less."""
ALIKE = 1e-9
"""Rounds take as long as one another that differ by less than this share."""


@dataclass(frozen=True)
class PipelineReplay:
    """The figures that a step of a pipeline is replayed with. ``trained``: of each stage, whether any of its weights
    is. ``chained``: the first rank gathers weights in its first forwards, others before them, and each rank waits
    itself while it sums gradients after its last backward; else all stages gather at once, and sum at the end."""

    plan: Plan
    trained: tuple[bool, ...]
    stages: tuple[StageTimes, ...]
    message_s: float
    chained: bool

    def step(self, micro_batches: int) -> Replay:
        """The step of so many micro-batches, computation by computation."""
        batch = replace(self.plan.batch, accumulation=micro_batches)
        lists, steps = orders(replace(self.plan, batch=batch), self.trained), self._program(micro_batches)
        left = [(action for action in order if action.computes) for order in lists]
        found, takes = [list[Timed]() for _ in lists], [*map(self._takes, steps.kinds)]
        done_s, ends_s = steps.ends_s(takes, self.message_s, self._waiting_s())
        computations = [(rank, kind) for rank, kind, *_ in steps.code if kind >= 0]
        for (rank, kind), end_s in zip(computations, ends_s[len(lists) :], strict=True):
            found[rank].append(Timed(next(left[rank]), end_s - takes[kind][0], end_s))
        return Replay(max(done_s), tuple(map(tuple, found)))

    def _program(self, micro_batches: int) -> Program:
        asked = self.plan.pipeline
        return program(asked.schedule, self.plan.layout.pp, asked.stages_per_rank, micro_batches, self.trained)

    def _waiting_s(self) -> list[float]:
        found = [0.0] * self.plan.layout.pp
        for number, stage in enumerate(self.stages):
            found[stage_rank(self.plan.layout, number)] += stage.waiting_s
        return found

    def makespan_s(self, micro_batches: int) -> float:
        """Return when all ranks are done with a step of so many micro-batches."""
        steps = self._program(micro_batches)
        ends_s, _ = steps.ends_s([*map(self._takes, steps.kinds)], self.message_s, self._waiting_s())
        if self.chained:
            return max(ends_s)
        closed_s = (end_s + self.stages[stage].closing_s for end_s, stage in zip(ends_s, steps.last, strict=True))
        return max(stage.opening_s for stage in self.stages) + max(closed_s)

    def _takes(self, kind: Computation) -> tuple[float, float]:
        """Seconds of a computation, and how long it goes on after what it gives another stage is there."""
        stage = self.stages[kind.stage]
        seconds = stage.each_s[kind.kind if kind.kind in stage.each_s else "B"]
        if not self.chained:
            return seconds, 0.0
        seconds += stage.opening_s if kind.first else stage.closing_s if kind.last else 0.0
        return seconds, stage.after_s[kind.last_given] if kind.kind in ("B", "I") else 0.0

    def replayed(self) -> tuple[int, float]:
        """Return of how many micro-batches the step was replayed, and how long that of all takes."""
        ranks, count = self.plan.layout.pp, self.plan.batch.accumulation
        rounds, more = ROUNDS, count % ranks  # of the rounds that many are a micro-batch larger
        while (few := ranks * (rounds + more) + more) < count:
            ends_s = [self.makespan_s(few - less * ranks) for less in (2, 1, 0)]
            before_s, after_s = (late - early for early, late in pairwise(ends_s))
            if abs(after_s - before_s) <= ALIKE * after_s:
                return few, ends_s[-1] + (count - few) // ranks * after_s
            rounds *= 2
        return count, self.makespan_s(count)


def least_step_s(
    plan: Plan, passes_s: tuple[Sequence[float], Sequence[float]], micro_batches: int, message_s: float
) -> float:
    """Return the seconds that a step of a pipeline takes at least, for the rank that needs most: until the first
    micro-batch has come to it, all that it computes, and until the last has left the ranks before it; or the way of its
    micro-batches to the last stage and back, of which only some are under way at a time. ``passes_s``: of a forward and
    of a backward, up to each block and to the end. ``message_s``: from a rank to the next."""
    layout = plan.layout
    schedule = plan.pipeline.spec
    most = 0.0
    stages, (f, b) = stages_of(plan.pipeline.split), passes_s
    for rank in range(layout.pp):
        own = {n: blocks for n, blocks in enumerate(stages) if stage_rank(layout, n) == rank}
        busy = sum(f[one.stop] - f[one.start] + b[one.stop] - b[one.start] for one in own.values())
        before = own[rank].start
        drains = (0.0 if schedule.splits_backward else b[before]) + rank * message_s * (b[before] > 0)
        most = max(most, rank * message_s + f[before] + micro_batches * busy + drains)
        if b[own[rank].stop] > 0:
            borders = sum(len(stages) - 1 - n - (layout.v_shaped and n < layout.pp) for n in own)
            away = sum(f[-1] - f[one.start] + b[-1] - b[one.start] for one in own.values())
            alive = schedule.most_alive(layout.pp, rank, plan.pipeline.stages_per_rank, micro_batches)
            most = max(most, micro_batches * (away + 2 * borders * message_s) / alive)
    return most


def alive_before(plan: Plan) -> int:
    """Return how many forwards the first rank of a pipeline has done at some time before it does a backward."""
    schedule = plan.pipeline.spec
    ranks = plan.layout.pp
    m = plan.batch.accumulation
    whole = m * plan.pipeline.stages_per_rank
    if schedule.alive is None:
        return whole
    return min(m, 2 * ranks - 1) if schedule.shape == "v" else min(whole, plan.pipeline.stages_per_rank * ranks)


def in_flight(sheet: Sheet, plan: Plan) -> list[int]:
    """Return for each stage of the sheet's rank how many forwards wait for their backward at once, at most."""
    if plan.layout.pp == 1 or plan.offload.activations == "none":
        return [1] * max(1, len(sheet.rank_kind.stages))
    order, found = orders(plan, sheet.trained)[sheet.rank_kind.coordinate("pp")], list[int]()
    for stage in sheet.rank_kind.stages:
        kinds = [action.kind for action in order if action.stage == stage.number and action.kind in "FBI"]
        found.append(max(accumulate(1 if kind == "F" else -1 for kind in kinds)))
    return found
