"""The seconds of a step of a plan: its events on a clock, then the optimizer and what the host does once a step.

Four micro-batches are played at most; the third stands for those left out, since from the second on all are alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, log, log2

from shardwise import techniques
from shardwise.models.config import ModelSpec
from shardwise.planner.event_log import folded_pass
from shardwise.planner.price import of_rank_kinds
from shardwise.planner.schedule import Step
from shardwise.planner.seconds.clock import Elapsed, StepClock, waited_s
from shardwise.planner.seconds.constants import shipped
from shardwise.planner.seconds.kernels import durations
from shardwise.planner.seconds.network import Network, network_of
from shardwise.planner.seconds.rates import Rates, Traits, own_traits, rates_of
from shardwise.planner.seconds.stages import pipeline_times
from shardwise.planner.spans import Span, joined
from shardwise.planner.unit_passes import Pass, Passes, put_off
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import BYTES, Plan, Seconds
from shardwise.spec.sheet import Sheet, Unit
from shardwise.techniques.events import ON_HOST, TO_HOST

PLAYED = 4
"""Micro-batches that are played: the first, two that are like all others, the last."""


def timed(
    spec: ModelSpec,
    plan: Plan,
    cluster: Cluster,
    traits: Traits | None = None,
    *,
    sheets: Sequence[Sheet] | None = None,
) -> Plan:
    """A priced plan with its seconds: those of the slowest kind of rank, of a pipeline those of the whole replay.
    ``sheets``: those of its ranks, where they are not the model's."""
    traits = traits or own_traits()
    if plan.layout.pp > 1:
        return replace(plan, estimate=replace(plan.estimate, seconds=piped(spec, plan, cluster, traits, sheets)))
    found: dict[tuple[tuple[Unit, ...], int], Seconds] = {}
    for costed in sheets or of_rank_kinds(spec, plan):
        alike = costed.units, costed.rank_kind.coordinate("ring")
        if alike not in found:
            found[alike] = seconds_of(costed, plan, cluster, traits)
    slowest = max(found.values(), key=lambda seconds: seconds.step_s)
    return replace(plan, estimate=replace(plan.estimate, seconds=slowest))


def seconds_of(costed: Sheet, plan: Plan, cluster: Cluster, traits: Traits) -> Seconds:
    """The seconds of a step at the place of a sheet, which the plan has rewritten."""
    rates = rates_of(plan, cluster, traits)
    now = _played(costed, plan, cluster, rates, traits)
    optimizer_s = optimizer(costed, plan, rates, unfused=traits.unfused) + multiplied_s(costed, plan, cluster, traits)
    late_s = max(0.0, max(now.at_s[stream] for stream in (TO_HOST, ON_HOST)) - now.at_s["compute"])
    waited_s = straggling(cluster) * now.exposed_s.pop("", 0.0)  # in passes, for copies: no axis is waited for
    return _offloaded(_summed(plan, cluster, traits, now, optimizer_s), plan, rates, [costed], late_s, waited_s)


def _offloaded(
    found: Seconds, plan: Plan, rates: Rates, at: Sequence[Sheet], late_s: float, waited_s: float
) -> Seconds:
    """Return the seconds with what is copied at places, of which that counts that copies longest. The device has
    ``waited_s`` for some of it in passes; it waits ``late_s`` after backward, until the last gradient has left, and for
    new weights where these come all at once."""
    moved = [techniques.moved(sheet, plan) for sheet in at]
    left_s, back_s = max(
        (sum(map(rates.moved_s, one.left)), max(map(rates.moved_s, one.back), default=0.0)) for one in moved
    )
    m = plan.batch.accumulation
    within_s = max(
        m * sum(map(rates.moved_s, one.each)) + (m - 1) * sum(map(rates.moved_s, one.earlier)) for one in moved
    )
    waits_s = late_s + (back_s if moved[0].waits else 0.0)
    return replace(
        found,
        **{key: vars(found)[key] * (1 + waits_s / found.step_s) for key in ("step_s", "low_s", "high_s")},
        compute_s=found.compute_s - waited_s,
        offload_s=waits_s + waited_s,
        copied_s=left_s + back_s + within_s,
    )


def piped(
    spec: ModelSpec, plan: Plan, cluster: Cluster, traits: Traits, sheets: Sequence[Sheet] | None = None
) -> Seconds:
    """The seconds of a step of a pipeline, told of the rank that computes longest. What it waits for the others is
    exposed along ``pp``."""
    times, rates = pipeline_times(spec, plan, cluster, traits, sheets), rates_of(plan, cluster, traits)
    now = times.elapsed(times.slowest)
    now.exposed_s["pp"] += max(0.0, times.makespan_s - now.at_s["compute"])
    now.at_s["compute"] = max(now.at_s["compute"], times.makespan_s)
    last = max(times.sheets, key=lambda sheet: sum(sent.bytes for sent in sheet.step))
    _send_last(now, last, network_of(plan.layout, cluster))
    optimizer_s = max(
        optimizer(sheet, plan, rates, unfused=traits.unfused) + multiplied_s(sheet, plan, cluster, traits)
        for sheet in times.sheets
    )
    waited_s = straggling(cluster) * now.exposed_s.pop("", 0.0)
    left_s = max(sum(map(rates.moved_s, techniques.moved(sheet, plan).left)) for sheet in times.sheets)
    return _offloaded(_summed(plan, cluster, traits, now, optimizer_s), plan, rates, times.sheets, left_s, waited_s)


def _summed(plan: Plan, cluster: Cluster, traits: Traits, now: Elapsed, optimizer_s: float) -> Seconds:
    """Return all seconds of a step, from what its passes come to."""
    slower = straggling(cluster)
    optimizer_s *= slower
    exposed = {axis: slower * seconds for axis, seconds in now.exposed_s.items() if seconds > 1e-12}
    passes_s = slower * max(now.at_s["compute"], now.host_s)
    host_s = traits.step_s if cluster.kind == "cuda" else 0.0
    step_s = passes_s + optimizer_s + host_s
    low_s, high_s, basis = band(plan, cluster, step_s, sum(exposed.values()))
    return Seconds(
        step_s=step_s,
        compute_s=passes_s - sum(exposed.values()),
        products_s=slower * now.busy_s["products"],
        attention_s=slower * now.busy_s["attention"],
        pointwise_s=slower * (now.busy_s["pointwise"] + now.busy_s["copies"]),
        exposed_s=exposed,
        sent_s={axis: slower * seconds for axis, seconds in now.sent_s.items()},
        optimizer_s=optimizer_s,
        host_s=host_s,
        low_s=low_s,
        high_s=high_s,
        basis=basis,
    )


def straggling(cluster: Cluster) -> float:
    """Return how many times as long a step takes on so many nodes, since all wait for the slowest."""
    return 1 + shipped()["stragglers"] * log2(max(1, cluster.nodes))


@dataclass(frozen=True)
class Least:
    """The least that the passes of a unit take: seconds of the device forward and backward, of which those that a
    backward in two halves puts off, and of the host."""

    forward_s: float
    backward_s: float
    later_s: float
    host_s: float


def least(costed: Sheet, plan: Plan, cluster: Cluster, traits: Traits) -> tuple[Least, ...]:
    """Return what each kind of unit takes at least, for a micro-batch: all that is computed, and what is sent between
    kernels, without a wait."""
    rates = rates_of(plan, cluster, traits)
    passes, network = Passes.of(costed, plan, cluster.kind, rates), network_of(plan.layout, cluster)
    found = []
    for unit in costed.units:
        forward, backward = _span(Passes.forward, passes, unit), _span(Passes.backward, passes, unit)
        device_s = [_on_device(span, network, traits) for span in (forward, backward)]
        later = put_off(unit)
        takes = durations(unit, "backward", rates, passes.b, passes.s) if later else ()
        later_s = sum(takes[i].device_ns for i in later) / 1e9
        found.append(Least(device_s[0], device_s[1], later_s, (forward.host_ns + backward.host_ns) / 1e9))
    return tuple(found)


def recomputations(costed: Sheet, units: Sequence[Unit], plan: Plan, cluster: Cluster) -> tuple[float, ...]:
    """Return the seconds of the device in which each of ``units``, which recompute, runs forward again, as
    :func:`least` has them within backward."""
    traits = own_traits()
    rates, network = rates_of(plan, cluster, traits), network_of(plan.layout, cluster)
    passes = Passes.of(costed, plan, cluster.kind, rates)
    return tuple(_on_device(_span(Passes.recompute, passes, unit), network, traits) for unit in units)


def _span(which: Pass, passes: Passes, unit: Unit) -> Span:
    return joined(piece for piece in folded_pass(which, passes, unit) if isinstance(piece, Span))


def _on_device(span: Span, network: Network, traits: Traits) -> float:
    """Return the seconds of all that a device computes, and of what is sent between kernels."""
    waits_s = sum(n * waited_s(send, network, traits.hidden) for send, n in span.sent.items())
    return sum(span.busy_ns.values()) / 1e9 + waits_s


def once_s(costed: Sheet, plan: Plan, cluster: Cluster, traits: Traits) -> float:
    """Return the seconds of a step's optimizer, but for products, and of what the host does."""
    rates = rates_of(plan, cluster, traits)
    return optimizer(costed, plan, rates, unfused=traits.unfused) + (traits.step_s if cluster.kind == "cuda" else 0.0)


def _played(costed: Sheet, plan: Plan, cluster: Cluster, rates: Rates, traits: Traits) -> Elapsed:
    """Return what the forward and backward passes of all micro-batches come to, with what is sent after them."""
    share = traits.network if plan.sharded else None
    clock = StepClock(rates, network_of(plan.layout, cluster, share), traits.hidden)
    step = Step(clock, costed, plan, Passes.of(costed, plan, cluster.kind, rates))
    count = plan.batch.accumulation
    played = min(count, PLAYED)
    after: list[Elapsed] = []
    for index in range(played):
        step.forward(index)
        step.backward(index, last=index == played - 1)
        after.append(clock.now.copy())
    now = clock.now
    if count > played:
        late_s = now.at_s[TO_HOST] - now.at_s["compute"]
        now.goes_on(after[1], after[2], count - played)
        now.at_s[TO_HOST] = now.at_s["compute"] + late_s  # what leaves in the last backward, and in none before it
    _send_last(now, costed, clock.network)
    return now


def _send_last(now: Elapsed, costed: Sheet, network: Network) -> None:
    """Add what is sent once, after the last backward: the gradient of tied ends, between two ranks; scalars; and what
    an optimizer asks others for."""
    for sent in costed.step:
        ends = sent.axis == "pp" and sent.category == "gradients"
        seconds = network.message_s(sent.bytes) if ends else network.seconds(sent.kind, sent.axis, sent.bytes)
        now.at_s["compute"] += seconds
        axis = network.layout.called(sent.axis) if sent.category == "moments" else "control"
        now.exposed_s["pp" if ends else axis] += seconds
        if axis != "control":
            now.sent_s[axis] += seconds


def optimizer(costed: Sheet, plan: Plan, rates: Rates, *, unfused: bool = False) -> float:
    """Seconds of clipping and of the optimizer, which read and write what the rank holds of weights, gradients and
    moments. Where it is no fused kernel it reads or writes a number more often, and gradients are scaled in memory,
    as they are on the host. From NVMe each number is read and written. What the device updates, it does while the host
    updates the rest."""
    updated = techniques.updated(costed, plan)
    weight = BYTES[plan.precision.weights]
    spec = plan.optim.spec
    moment = spec.kept * (1 if spec.packed else BYTES[plan.optim.moments or plan.precision.weights])
    once = weight + 2 * weight + 2 * moment + weight  # the norm reads gradients first
    moved = once if spec.fused and not unfused else weight * spec.passes
    streamed = updated.filed * (weight + moment)
    on_host_s = updated.elsewhere * (moved + 2 * weight) / rates.host_bytes_per_s
    elsewhere_s = max(on_host_s, sum(streamed / rate for rate in rates.disk_bytes_per_s))
    kernels = -(-updated.tensors // 64) * 4 if rates.cuda else 2 * updated.tensors
    return max(elsewhere_s, rates.updated_s(updated.numbers * moved, kernels))


def multiplied_s(costed: Sheet, plan: Plan, cluster: Cluster, traits: Traits) -> float:
    """Return the seconds of the products of an update, in whatever dtype it computes them."""
    whole = techniques.on_whole_matrices(costed, plan)
    rates = rates_of(replace(plan, precision=replace(plan.precision, compute=whole.dtype)), cluster, traits)
    return sum(times * rates.product_s(1, *sizes) for sizes, times in Counter(whole.products).items())


def band(plan: Plan, cluster: Cluster, step_s: float, exposed_s: float) -> tuple[float, float, str]:
    """Between which seconds four steps in five lie, and what that rests on: how far published steps were from what this
    model says of them, on machines and software that it was not fitted to."""
    known, fine = shipped(), " fine-tune" if plan.lora is not None else ""
    between, within = known[f"band source{fine}"], known[f"band row{fine}"]
    basis = "published steps on this device"
    if cluster.measured is not None:
        between, basis = between / 2, "what doctor measured"
    elif cluster.kind == "cpu":
        between, basis = 8 * between, "rough figures of a CPU: `shardwise doctor -o cluster.yaml` measures this one"
    elif f"best product:{cluster.device.name}" not in known:
        between, basis = 2 * between, "published steps on other devices"
    guessed = log(1 + exposed_s / step_s) if cluster.nodes > 1 and cluster.measured is None else 0.0
    width = hypot(between, within, guessed)
    return step_s * exp(-width), step_s * exp(known["band slow"] * width), basis
