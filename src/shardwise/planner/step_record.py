"""What pictures of a step are drawn from: the memory of a rank pass by pass, and what each stream does when."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from shardwise.models.config import ModelSpec
from shardwise.planner.comparison import seconds
from shardwise.planner.played import enough
from shardwise.planner.price import by_category, of_each_kind, of_rank_kinds
from shardwise.planner.schedule import Step, schedule
from shardwise.planner.seconds.clock import StepClock
from shardwise.planner.seconds.network import network_of
from shardwise.planner.seconds.rates import own_traits, rates_of
from shardwise.planner.seconds.step_seconds import straggling
from shardwise.planner.unit_passes import Passes
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.range_names import OPTIMIZER, pass_name, sent_name, unit_name
from shardwise.spec.sheet import Sheet, Tier
from shardwise.techniques.events import Begin, Copy, Event, Free, Key, Make, Send

SHOWN = 2
"""Micro-batches whose streams are shown: the first, and the last, in which gradients leave."""
Levels = list[dict[str, int]]


def memory_by_pass(spec: ModelSpec, plan: Plan, cluster: Cluster) -> Levels:
    """Bytes by category at the highest moment of each pass of a unit, on the rank that is fullest at its peak: before
    the first pass, then forward and backward of each unit in the order of the run."""
    fullest, _ = max(of_each_kind(spec, plan, cluster), key=lambda one: one[1].share)
    return _levels(fullest, spec, plan, cluster)


def _levels(costed: Sheet, spec: ModelSpec, plan: Plan, cluster: Cluster) -> Levels:
    tiers = ("device", "host") if cluster.kind == "cpu" else ("device",)  # of a CPU the device is the host
    held, found = Counter[str](), Levels()
    total = top = 0
    highest = dict[str, int]()
    for event in schedule(costed, plan, cluster.kind, brief=True):
        if isinstance(event, Begin):
            found.append(highest)
            top, highest = total, dict(held)
        elif isinstance(event, Make | Free) and event.tier in tiers:
            size = event.bytes if isinstance(event, Make) else -event.bytes
            total += size
            held[event.category if event.tier == "device" else "offloaded"] += size
            if total > top:
                top, highest = total, dict(held)
    found.append(highest)
    return [by_category(level, costed, spec, plan, cluster) for level in found]


@dataclass(frozen=True)
class Played:
    """What a stream does from one moment to another: ``kind`` is ``forward``, ``backward``, ``leaving``, ``waits``,
    ``sends``, ``copies``, ``optimizer`` or ``host``; ``what`` says more. ``name``: that of a trace; ``during``: the
    number of the pass that the rank is in, -1 outside of all; ``told``: bytes, axis and the like."""

    begin_s: float
    end_s: float
    kind: str
    what: str
    name: str = ""
    during: int = -1
    told: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class StepRecord:
    """The streams of one kind of rank in a step of ``micro_batches`` of the plan's, by the name of the stream.
    ``passes``: of each unit, when it begins; ``costed``: the sheet of the rank."""

    rank: int
    micro_batches: int
    costed: Sheet
    passes: list[tuple[float, Begin]]
    streams: dict[str, list[Played]] = field(default_factory=dict)


def streams_of_kinds(spec: ModelSpec, plan: Plan, cluster: Cluster, most: int = SHOWN) -> list[StepRecord]:
    """A record for each kind of rank of a plan without a pipeline, whose passes take differently long, of at ``most``
    so many micro-batches."""
    found = dict[Hashable, StepRecord]()
    for costed in of_rank_kinds(spec, plan):
        alike = costed.units, costed.rank_kind.coordinate("ring")
        if alike not in found:
            found[alike] = _recorded(costed, plan, cluster, most)
    return [*found.values()]


def memory_of(record: StepRecord, spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[tuple[float, dict[str, int]]]:
    """The beginning of each pass, in seconds, and the bytes by category at its highest moment."""
    levels, several, played = _levels(record.costed, spec, plan, cluster)[1:], enough(plan), record.micro_batches
    if played != several:
        each = sum(begun.micro_batch == 0 and begun.direction != "leaving" for _, begun in record.passes)
        levels = levels[:each] + (played - 2) * levels[each : 2 * each] + levels[(several - 1) * each :]
    return [(begin_s, level) for (begin_s, _), level in zip(record.passes, levels, strict=True)]


def _recorded(costed: Sheet, plan: Plan, cluster: Cluster, most: int) -> StepRecord:
    traits = own_traits()
    rates, network = (
        rates_of(plan, cluster, traits),
        network_of(plan.layout, cluster, traits.network if plan.sharded else None),
    )
    clock = RecordingClock(rates, network, traits.hidden)
    step = Step(clock, costed, plan, Passes.of(costed, plan, cluster.kind, rates))
    played = min(plan.batch.accumulation, most)
    for index in range(played):
        step.forward(index)
        step.backward(index, last=index == played - 1)
    clock.send_last(costed)
    told = seconds(plan)
    slower = straggling(cluster) * told.scale
    streams = {
        name: [replace(one, begin_s=slower * one.begin_s, end_s=slower * one.end_s) for one in each]
        for name, each in clock.played.items()
    }
    at_s = max(one.end_s for one in streams["compute"])
    late_s = told.step_s - at_s - told.optimizer_s - told.host_s  # for what is copied after the last pass
    copied = told.offload_s > 0 and played == plan.batch.accumulation
    parts = ("waits", "waits for copies", late_s * copied), (OPTIMIZER, OPTIMIZER, told.optimizer_s)
    for kind, what, part_s in (*parts, ("host", "host", told.host_s)):
        streams["compute"] += [Played(at_s, at_s + part_s, kind, what, what)] * (part_s > 0)
        at_s += max(0.0, part_s)
    passes = [(slower * begin_s, begun) for begin_s, begun in clock.passes]
    return StepRecord(costed.rank_kind.rank, played, costed, passes, streams)


class RecordingClock(StepClock):
    """A clock that keeps what each stream does from when to when."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.played: defaultdict[str, list[Played]] = defaultdict(list)
        self.passes: list[tuple[float, Begin]] = []
        self.kind, self.what, self.name = "forward", "before the first unit", "before the first unit"
        self.during = -1
        self.unit = dict[str, str]()  # what each stream gathers or reduces

    def _keep(self, stream: str, length_s: float, kind: str, what: str, name: str, **told: int | str) -> None:
        """Keep what a stream has done in so many seconds until now."""
        if length_s > 0:
            end_s = self.now.at_s[stream]
            self.played[stream].append(Played(end_s - length_s, end_s, kind, what, name, self.during, told))

    def make(self, key: Key, category: str, size: int, tier: Tier = "device") -> None:
        super().make(key, category, size, tier)
        if isinstance(key, tuple) and key[0] == "gather":
            self.unit["gather"] = _unit_of(key[1])

    def record(self, stream: str, mark: Hashable) -> None:
        super().record(stream, mark)
        match mark:
            case ("to scatter", group):
                self.unit["reduce"] = self.unit["all_reduce"] = _unit_of(group)
            case ("bucket", (_, number)):
                self.unit["reduce"] = f"bucket {number}"

    def add(self, event: Event) -> None:
        if isinstance(event, Begin):
            unit, self.name = unit_name(event.unit), pass_name(event.direction, event.unit)
            self.kind, self.what = event.direction, f"{event.direction} of {unit}, micro-batch {event.micro_batch}"
            self.during = len(self.passes)
            self.passes.append((self.now.at_s["compute"], event))
        before_s = self.now.at_s[event.stream] if isinstance(event, Copy) else 0.0
        super().add(event)
        if isinstance(event, Copy) and event.stream != "compute":
            taken_s = min(self.rates.moved_s(event), self.now.at_s[event.stream] - before_s)
            ways = f"{event.source} to {event.target}"
            self._keep(event.stream, taken_s, "copies", ways, f"copy {ways}", bytes=event.bytes)

    def send_last(self, costed: Sheet) -> None:
        """What is sent once, after all passes, which the device waits for."""
        self.during = -1
        for sent in costed.step:
            length_s = self.network.seconds(sent.kind, sent.axis, sent.bytes)
            self.now.at_s["compute"] += length_s
            self._sent(Send(sent.kind, sent.axis, sent.category, sent.bytes), 1, length_s)

    def _compute(self, device_s: float, host_s: float) -> None:
        begun_s = max(self.now.at_s["compute"], self.now.host_s)
        super()._compute(device_s, host_s)
        self._keep("compute", self.now.at_s["compute"] - begun_s, self.kind, self.what, self.name)

    def _send(self, send: Send, calls: int) -> None:
        before_s = self.now.at_s[send.stream]
        super()._send(send, calls)
        after_s = self.now.at_s[send.stream]
        taken_s = min(after_s - before_s, calls * self.network.seconds(send.kind, send.axis, send.bytes))
        self._sent(send, calls, taken_s)

    def _sent(self, send: Send, calls: int, taken_s: float) -> None:
        kind, axis = "waits" if send.stream == "compute" else "sends", self.network.layout.called(send.axis)
        what = f"{send.kind.replace('_', '-')} of {send.category} ({axis})"
        name = sent_name(send.kind, send.category, self.unit.get(send.stream, ""))
        self._keep(send.stream, taken_s, kind, what, name, axis=axis, bytes=calls * send.bytes, calls=calls)

    def wait(self, stream: str, mark: Hashable) -> None:
        before_s = self.now.at_s[stream]
        super().wait(stream, mark)
        if stream == "compute":
            what = f"waits for {self.at[mark][1] or 'copies'}"
            self._keep(stream, self.now.at_s[stream] - before_s, "waits", what, what)


def _unit_of(group: object) -> str:
    """The name of what is gathered or reduced as one: a unit, or the experts of a block."""
    return f"experts of {unit_name(group[0])}" if isinstance(group, tuple) else unit_name(group)  # type: ignore[arg-type]
