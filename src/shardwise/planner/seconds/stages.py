"""The seconds of a step of a pipeline: each stage is played on a clock, then the list of actions is replayed with what
its passes took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from shardwise import techniques
from shardwise.models.config import ModelSpec
from shardwise.planner.price import along_pipeline
from shardwise.planner.schedule import Step
from shardwise.planner.seconds.clock import Elapsed, StepClock
from shardwise.planner.seconds.network import network_of
from shardwise.planner.seconds.rates import Traits, rates_of
from shardwise.planner.unit_passes import Passes
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.sheet import Sheet

StagePasses = tuple[Elapsed, Elapsed, Elapsed]
"""All that happens in the first micro-batch of a stage, in one that is like most, and in the last."""


@dataclass(frozen=True)
class PipelineTimes:
    """``sheets``: of each rank of a pipeline; ``passes``: of each stage. ``line`` replays a step: of so many
    micro-batches as were ``played``; ``makespan_s`` is of all. ``slowest``: the rank that computes longest."""

    sheets: tuple[Sheet, ...]
    passes: tuple[StagePasses, ...]
    line: techniques.PipelineReplay
    played: int
    makespan_s: float

    @cached_property
    def step(self) -> techniques.Replay:
        """Return when ranks compute, perhaps of some micro-batches."""
        return self.line.step(self.played)

    @property
    def slowest(self) -> int:
        return max(range(len(self.sheets)), key=lambda rank: self.elapsed(rank).at_s["compute"])

    def elapsed(self, rank: int) -> Elapsed:
        """All that happens in a rank's passes, and what it sends along ``pp``."""
        total, count = Elapsed(), self.line.plan.batch.accumulation
        own = {stage.number for stage in self.sheets[rank].rank_kind.stages}
        beside = {number + step for number in own for step in (-1, 1)} - own - {-1, len(self.passes)}
        total.sent_s["pp"] = count * len(beside) * self.line.message_s
        for number in own:
            first, usual, last = self.passes[number]
            for passed, times in ((first, 1), (usual, count - 2), (last, 1)):
                total.goes_on(Elapsed(), passed, times)
        return total


def pipeline_times(
    spec: ModelSpec, plan: Plan, cluster: Cluster, traits: Traits, given: Sequence[Sheet] | None = None
) -> PipelineTimes:
    """Return the times of the ranks that are first on all other axes, whose sheets may be ``given``."""
    sheets, rates = tuple(given or along_pipeline(spec, plan)), rates_of(plan, cluster, traits)
    times, known = dict[int, object](), dict[object, tuple[techniques.StageTimes, StagePasses]]()
    for sheet in sheets:
        for stage in sheet.rank_kind.stages:
            own, trained = sheet.of_stage(stage), sheet.trained[stage.number]
            waits = traits.chained and sheet.rank_kind.coordinate("pp") > 0
            units = own.embedding, *(own.blocks[kind] for kind in own.order), own.head
            alike = units, trained, waits
            if alike not in known:
                network = network_of(plan.layout, cluster, traits.network if plan.sharded else None)
                clock = StepClock(rates, network, traits.hidden)
                played = Step(clock, own, plan, Passes.of(own, plan, cluster.kind, rates), stage.number)
                known[alike] = _stage_times(clock, played, plan, trained=trained, waits=waits)
            times[stage.number] = alike
    stages, passes = zip(*(known[times[number]] for number in sorted(times)), strict=True)
    parts = plan.layout.tp if traits.scattered and not plan.sequence_parallel else 1
    message_s = network_of(plan.layout, cluster).message_s(border_bytes(sheets[0], plan) // parts)
    line = techniques.PipelineReplay(plan, sheets[0].trained, stages, message_s, traits.chained and plan.sharded)
    return PipelineTimes(sheets, passes, line, *line.replayed())


def border_bytes(sheet: Sheet, plan: Plan) -> int:
    """Return the bytes of a message from a stage to the next."""
    block = sheet.blocks[0]
    return block.tensors[block.input].bytes(plan.batch.micro_batch_size, plan.row_tokens) * sheet.per_token


def _stage_times(
    clock: StepClock, step: Step, plan: Plan, *, trained: bool, waits: bool
) -> tuple[techniques.StageTimes, StagePasses]:
    """Return the times of one stage, from three micro-batches: the first, one that is like most, and the last.
    ``waits``: the first comes from another rank."""
    halved = plan.pipeline.spec.splits_backward and trained
    parts = list[list[float]]()
    passes = list[Elapsed]()
    after_s = list[float]()
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
    times = techniques.StageTimes(each_s, waiting_s, *more, (after_s[1], after_s[2]))
    return times, (passes[0], passes[1], passes[2])
