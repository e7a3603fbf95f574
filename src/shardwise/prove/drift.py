"""The drift test: what ``cost`` predicts of a plan and what the real ``apply`` does in a fake world, side by side."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shardwise import techniques
from shardwise.models.config import ModelSpec
from shardwise.planner.schedule import folded, schedule
from shardwise.planner.sheets import Units, sheet_of
from shardwise.planner.spans import fold, memory_at_marks, same
from shardwise.planner.trace import traced_here
from shardwise.prove.fake_run import StepBytes, measure
from shardwise.spec.cluster import Kind
from shardwise.spec.plan import Offload, Plan
from shardwise.spec.rank_kind import rank_kind_of
from shardwise.spec.sheet import CONTROL_BYTES
from shardwise.techniques import optim

PEAK_TOLERANCE = 0.03
"""Of the peak of a step that takes at least ``PEAK_FROM_BYTES``."""
PEAK_FROM_BYTES = 2**30


@dataclass(frozen=True)
class Drift:
    """A plan on one rank, predicted and measured. Empty :meth:`differences` means that the plan describes the run."""

    plan: Plan
    rank: int
    predicted: StepBytes
    measured: StepBytes

    def differences(self) -> list[str]:
        """Everything that is not equal, to the byte. Compiled blocks may save less than predicted, never more."""
        found = []
        for key in sorted({*self.predicted.sent, *self.measured.sent}):
            want, got = self.predicted.sent[key], self.measured.sent[key]
            if want != got:
                axis, kind, size = key
                found.append(f"{kind} of {size:,} bytes on {axis}: {want} predicted, {got} measured")
        for name, want in self.predicted.state.items():
            if want != self.measured.state[name]:
                found.append(f"{name}: {want:,} bytes predicted, {self.measured.state[name]:,} measured")
        if self.predicted.copied != self.measured.copied:
            found.append(f"copied between tiers: {self.predicted.copied} predicted, {self.measured.copied} measured")
        saved, real = self.predicted.saved_bytes, self.measured.saved_bytes
        if saved != real and not (self.plan.compile and real < saved):
            found.append(f"saved for backward: {saved:,} bytes predicted, {real:,} measured")
        if self.measured.peak_bytes >= PEAK_FROM_BYTES and abs(self.peak_error) > PEAK_TOLERANCE:
            found.append(f"peak: {self.predicted.peak_bytes:,} bytes predicted, {self.measured.peak_bytes:,} measured")
        return found

    @property
    def peak_error(self) -> float:
        return self.predicted.peak_bytes / self.measured.peak_bytes - 1


def predict(spec: ModelSpec, plan: Plan, rank: int = 0, device: Kind = "cpu", units: Units | None = None) -> StepBytes:
    """Return what the planner says of one rank, on such a device. Raises AssertionError where the span that a plan is
    priced with is not that of the events one by one."""
    rank_kind = rank_kind_of(rank, plan.layout, plan.stages(spec.num_hidden_layers))
    costed = techniques.cost(sheet_of(spec, plan, rank_kind, units), plan)
    events = schedule(costed, plan, device)
    span, at = fold(events), memory_at_marks(events)
    assert same(folded(costed, plan, device), span), "the repeated spans of blocks are not what the events come to"
    sent: Counter[tuple[str, str, int]] = Counter()
    for send, calls in span.sent.items():
        control = send.bytes <= CONTROL_BYTES and plan.layout.size(send.axis) == plan.layout.world
        sent["world" if control else plan.layout.called(send.axis), send.kind, send.bytes] += calls
    start, end = (sum(at[mark].values()) for mark in ("start of forward", "end of forward"))
    if plan.layout.pp > 1:  # between two passes messages are posted and sent: the peak tells
        start = end
    state = optim.state_bytes(costed, plan)
    state["weights"] = techniques.held(costed, plan)["device", "weights"]
    if plan.offload != Offload():
        state["host"] = span.on("host").top_bytes
    if plan.offload.activations == "nvme":
        state["disk"] = span.on("disk").top.get("activations", 0)
    copied: dict[tuple[str, str], int] = {}
    for copy, times in span.copied.items():
        if copy.source != copy.target:
            between = copy.source, copy.target
            copied[between] = copied.get(between, 0) + times * copy.bytes
    state["gradients"] = at["end of backward"].get("gradients", 0)
    return StepBytes(sent, state, end - start, span.top_bytes + span.on("host").top_bytes, copied)


def drift(spec: ModelSpec, plan: Plan, rank: int = 0) -> Drift:
    """Predicts and measures ``plan`` on ``rank`` of its world. Units are traced, whatever ships or was kept."""
    return Drift(plan, rank, predict(spec, plan, rank, units=traced_here), measure(spec, plan, rank))
