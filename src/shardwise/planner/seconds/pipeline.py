"""The seconds of a step of a pipeline: each stage is played on a clock, then the list of actions is replayed with what
its passes took.

Of many micro-batches some are replayed, a round of as many as there are ranks less each time, until a round more takes
as long as the round before it: all others do too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from shardwise.models.config import ModelSpec
from shardwise.planner.passes import Passes
from shardwise.planner.price import along_pipeline
from shardwise.planner.schedule import Step
from shardwise.planner.seconds.clock import Elapsed, StepClock
from shardwise.planner.seconds.rates import Traits, rates_of
from shardwise.planner.seconds.wires import wires_of
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import stage_rank
from shardwise.spec.plan import Plan
from shardwise.spec.sheet import Sheet
from shardwise.techniques import pp
from shardwise.techniques.pp.actions import Action, Lists
from shardwise.techniques.pp.compiled import Computation, program
from shardwise.techniques.pp.replay import Replay, replay
from shardwise.techniques.pp.split import trained_stages

ROUNDS = 4
"""Of so many rounds a replay is compared with those of one round and of two rounds less."""
ALIKE = 1e-9
"""Rounds take as long as one another that differ by less than this share."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a stage's passes of a micro-batch, by kind of action. ``waiting_s``: of what is done before the first
    message comes. ``opening_s`` and ``closing_s``: how much longer its first forward takes, before which weights may be
    gathered, and its last backward, after which gradients are reduced. ``after_s``: how long its backward goes on when
    the gradient of its input is there, and its last. ``passes``: all that happens in the first micro-batch, in one that
    is like most, and in the last."""

    each_s: dict[str, float]
    waiting_s: float
    opening_s: float
    closing_s: float
    after_s: tuple[float, float]
    passes: tuple[Elapsed, ...]


@dataclass(frozen=True)
class PipelineTimes:
    """``sheets``: of each rank of a pipeline; ``stages``: the times of each stage. ``line`` replays a step: of so many
    micro-batches as were ``played``; ``makespan_s`` is of all. ``message_s``: what a message between neighbours takes;
    ``slowest``: the rank that computes longest."""

    sheets: tuple[Sheet, ...]
    stages: tuple[StageTimes, ...]
    line: PipelineReplay
    played: int
    makespan_s: float
    message_s: float
    micro_batches: int

    @cached_property
    def step(self) -> Replay:
        """Return when ranks compute, perhaps of some micro-batches."""
        return self.line.step(self.played)

    @property
    def slowest(self) -> int:
        return max(range(len(self.sheets)), key=lambda rank: self.elapsed(rank).at_s["compute"])

    def elapsed(self, rank: int) -> Elapsed:
        """All that happens in a rank's passes, and what it sends along ``pp``."""
        total, count = Elapsed(), self.micro_batches
        own = {stage.number for stage in self.sheets[rank].place.stages}
        beside = {number + step for number in own for step in (-1, 1)} - own - {-1, len(self.stages)}
        total.sent_s["pp"] = count * len(beside) * self.message_s
        for number in own:
            first, usual, last = self.stages[number].passes
            for passed, times in ((first, 1), (usual, count - 2), (last, 1)):
                total.goes_on(Elapsed(), passed, times)
        return total


def pipeline_times(spec: ModelSpec, plan: Plan, cluster: Cluster, traits: Traits) -> PipelineTimes:
    """Return the times of the ranks that are first on all other axes."""
    sheets, rates = tuple(along_pipeline(spec, plan)), rates_of(plan, cluster, traits)
    times, known = dict[int, StageTimes](), dict[object, StageTimes]()
    for sheet in sheets:
        for stage in sheet.place.stages:
            own, trained = sheet.of_stage(stage), sheet.trained[stage.number]
            waits = traits.chained and sheet.place.coordinate("pp") > 0
            units = own.stem, *(own.blocks[kind] for kind in own.order), own.tail
            alike = units, trained, waits
            if alike not in known:
                wires = wires_of(plan.layout, cluster, traits.network if plan.sharded else None)
                clock = StepClock(rates, wires, traits.hidden)
                played = Step(clock, own, plan, Passes.of(own, plan, cluster.kind, rates), stage.number)
                known[alike] = _stage_times(clock, played, plan, trained=trained, waits=waits)
            times[stage.number] = known[alike]
    stages = tuple(times[number] for number in sorted(times))
    parts = plan.layout.tp if traits.scattered and not plan.sequence_parallel else 1
    message_s = wires_of(plan.layout, cluster).message_s(border_bytes(sheets[0], plan) // parts)
    line = PipelineReplay(plan, trained_stages(spec, plan), stages, message_s, traits.chained and plan.sharded)
    return PipelineTimes(sheets, stages, line, *line.replayed(), message_s, plan.batch.accumulation)


def border_bytes(sheet: Sheet, plan: Plan) -> int:
    """Return the bytes of a message from a stage to the next."""
    block = sheet.blocks[0]
    return block.tensors[block.input].bytes(plan.batch.micro_batch_size, plan.row_tokens) * sheet.per_token


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
        """The step of so many micro-batches."""
        batch = replace(self.plan.batch, accumulation=micro_batches)
        lists = pp.orders(replace(self.plan, batch=batch), self.trained)
        kind = self._kinds(lists)
        after = (lambda action: self._takes(kind(action))[1]) if self.chained else None
        return replay(lists, lambda action: self._takes(kind(action))[0], self.message_s, after, self._waiting_s())

    def _waiting_s(self) -> list[float]:
        found = [0.0] * self.plan.layout.pp
        for number, stage in enumerate(self.stages):
            found[stage_rank(self.plan.layout, number)] += stage.waiting_s
        return found

    def makespan_s(self, micro_batches: int) -> float:
        """Return when all ranks are done with a step of so many micro-batches: what :meth:`step` comes to, found by the
        schedule's program."""
        asked = self.plan.pipeline
        steps = program(asked.schedule, self.plan.layout.pp, asked.stages_per_rank, micro_batches, self.trained)
        ends_s = steps.ends_s([*map(self._takes, steps.kinds)], self.message_s, self._waiting_s())
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

    def _kinds(self, lists: Lists) -> Callable[[Action], Computation]:
        """Return a function that says of which kind a computation is."""
        first, last, given = dict[int, Action](), dict[int, Action](), dict[int, Action]()
        for one in (action for order in lists for action in order):
            if one.kind == "F":
                first.setdefault(one.stage, one)
            if one.kind in ("B", "I", "W"):
                last[one.stage] = one
            if one.kind in ("B", "I"):
                given[one.stage] = one

        def kind(one: Action) -> Computation:
            ends = (each.get(one.stage) == one for each in (first, last, given))
            return Computation(one.kind, one.stage, *ends)

        return kind

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


def _stage_times(clock: StepClock, step: Step, plan: Plan, *, trained: bool, waits: bool) -> StageTimes:
    """Return the times of one stage of a place, by three micro-batches: the first, one that is like most, and the last.
    ``waits``: the first comes from another rank."""
    halved = plan.pipeline.spec.splits_backward and trained
    parts, passes, after_s = list[list[float]](), list[Elapsed](), list[float]()
    begun = clock.now.copy()
    if waits:
        step.weights.before_waiting(step.names)
    waiting_s = clock.now.at_s["compute"] - begun.at_s["compute"]
    for micro in range(3):
        at = [clock.now.copy()]
        step.forward(micro)
        at.append(clock.now.copy())
        if halved:
            step.input_gradients(micro, last=micro == 2)
            after_s.append(clock.now.at_s["compute"] - clock.given_s)
            at.append(clock.now.copy())
            step.weight_gradients(micro, last=micro == 2)
        else:
            step.backward(micro, last=micro == 2)
            after_s.append(clock.now.at_s["compute"] - clock.given_s)
        at.append(clock.now.copy())
        parts.append([late.at_s["compute"] - early.at_s["compute"] for early, late in pairwise(at)])
        passes.append(Elapsed())
        passes[-1].goes_on(at[0] if micro else begun, at[-1], 1)
    opening, usual, closing = parts
    each_s = {"F": usual[0], "B": sum(usual[1:])} | ({"I": usual[1], "W": usual[2]} if halved else {})
    more = max(0.0, opening[0] - usual[0]), max(0.0, sum(closing[1:]) - sum(usual[1:]))
    return StageTimes(each_s, waiting_s, *more, (after_s[1], after_s[2]), (passes[0], passes[1], passes[2]))
