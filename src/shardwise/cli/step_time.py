"""The lines that say how long a step takes and what it waits for."""

from __future__ import annotations

from dataclasses import replace

from shardwise.models.config import ModelSpec
from shardwise.planner.comparison import seconds, tokens_per_s
from shardwise.planner.price import price
from shardwise.planner.seconds.rates import own_traits, rates_of
from shardwise.spec.cluster import Cluster
from shardwise.spec.measured import Measured
from shardwise.spec.plan import Plan, Remat, Seconds
from shardwise.spec.units import columns, show_count, show_payload, show_seconds

LITTLE, MUCH = 0.05, 0.25
"""Shares of a step that wait for collectives: below the one the links do not matter, from the other on they are the
bottleneck."""


def mfu(spec: ModelSpec, plan: Plan, cluster: Cluster) -> float | None:
    """The share of the devices' 16-bit peak that the model's own operations need, causal attention and no
    recomputation counted; None where no peak is known."""
    if not cluster.device.bf16_flops:
        return None
    flops = price(spec, replace(plan, remat=Remat(), expert_imbalance=1.0), cluster).estimate.flops_per_step
    return flops / seconds(plan).step_s / cluster.device.bf16_flops / cluster.world


def step_lines(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[str]:
    """A step in two lines: how long, how sure, how fast; and what of."""
    found, share = seconds(plan), mfu(spec, plan, cluster)
    low, high = show_seconds(found.low_s), show_seconds(found.high_s)
    reached = f" · MFU {share:.0%}" if share is not None else ""
    return [
        f"a step  {show_seconds(found.step_s)} ({low} to {high}: {found.basis}) · "
        f"{show_count(tokens_per_s(plan))} tokens/s{reached}",
        "        " + " · ".join(f"{name} {show_seconds(part)}" for name, part in parts(found)),
    ]


def assumed_rates(plan: Plan, cluster: Cluster) -> str | None:
    """Tell at which rates the host, the way there and the disks of a node are assumed to work, where the plan uses
    them; None where nothing is assumed."""
    if not plan.offload.words:
        return None
    rates = rates_of(plan, cluster, own_traits())
    ranks = cluster.devices_per_node
    measured = cluster.measured
    known, found = measured or Measured(), list[str]()
    beside = cluster.kind == "cuda"  # of a CPU the device is the host
    if beside and plan.offload.optimizer != "none" and not known.host_bytes_per_s:
        found.append(f"the host of a node updates weights at {show_payload(ranks * rates.host_bytes_per_s)}/s")
    if beside and not (known.from_device_bytes_per_s and known.to_device_bytes_per_s):
        found.append(f"each GPU copies {show_payload(rates.host_link_bytes_per_s[0])}/s to it, and as much back")
    if plan.offload.filed and not (known.disk_bytes_per_s or cluster.disk_bytes_per_s):
        read, written = (show_payload(ranks * rate) for rate in rates.disk_bytes_per_s)
        found.append(f"disks of a node write {written}/s and read {read}/s (say ,disk=<N>TB@<N>GB/s)")
    return f"assumed: {'; '.join(found)}" if found else None


def parts(found: Seconds) -> list[tuple[str, float]]:
    """Return what a step's seconds are made of, but for waits of less than a two-thousandth of them."""
    waits = [(f"waits for {axis}", part) for axis, part in found.exposed_s.items() if part >= 0.0005 * found.step_s]
    others = [("optimizer", found.optimizer_s), ("waits for copies", found.offload_s), ("host", found.host_s)]
    return [("computes", found.compute_s), *waits, *((name, part) for name, part in others if part)]


def bottleneck(plan: Plan, cluster: Cluster) -> str | None:
    """Say whether a step waits for the links, and what would help; None for one rank."""
    if plan.layout.world == 1:
        return None
    found = seconds(plan)
    waits_s = sum(found.exposed_s.values())
    share = waits_s / found.step_s
    if share < LITTLE:
        sending = f"of {show_seconds(sum(found.sent_s.values()))} of sending"
        return f"the links are not the bottleneck: {share:.0%} of a step waits for them, {sending}"
    axis = max(found.exposed_s, key=lambda name: found.exposed_s[name])
    if axis == "pp":
        idle = found.exposed_s[axis] / found.step_s
        head = f"the pipeline idles for {idle:.0%} of a step, while it fills and drains"
        return f"{head}; more micro-batches (train.global_batch_size) or fewer ranks a pipeline would help"
    across = any(t.axis == axis and t.link == "network" for t in plan.estimate.traffic)
    link, verb = ("the network between nodes", "is") if across else ("the links inside a node", "are")
    head = f"{link} {verb} {'the bottleneck' if share >= MUCH else 'a part of it'}"
    help_ = " or ".join(_help(plan, cluster, across, axis))
    return f"{head}: {share:.0%} of a step waits, most for {axis}; {help_} would help"


def _help(plan: Plan, cluster: Cluster, across: bool, axis: str) -> list[str]:
    """Return what would make a step wait less for this axis."""
    if axis == "tp":
        ours = "fewer ranks a tensor-parallel group"
    elif plan.shard.strategy == "zero3" and plan.batch.accumulation > 1:
        ours = "fewer, larger micro-batches (weights are gathered for each)"
    else:
        ours = "more sequences a step (train.global_batch_size)"
    if across:
        return [ours, "faster links between nodes"]
    return [ours] if cluster.device.peer_bytes_per_s or cluster.kind == "cpu" else [ours, "GPUs with NVLink"]


def time_lines(plan: Plan) -> list[str]:
    """Every part of a step: kernels by kind, and each axis with what is sent, hidden and waited for."""
    return ["  " + line for line in columns(time_rows(plan), "<>><")]


def time_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Each part with its seconds, its share of the step, and more of it."""
    found = seconds(plan)
    kinds = [("products", found.products_s), ("attention", found.attention_s), ("pointwise", found.pointwise_s)]
    rest_s = max(0.0, found.compute_s - sum(part for _, part in kinds))
    rows = [(name, part, "") for name, part in (*kinds, ("launches, and kernels slowed by collectives", rest_s))]
    for axis in sorted({*found.exposed_s, *found.sent_s}):
        waits_s, sent_s = found.exposed_s.get(axis, 0.0), found.sent_s.get(axis, 0.0)
        rows.append((f"waits for {axis}", waits_s, f"of {show_seconds(max(sent_s, waits_s))} of sending"))
    if found.copied_s:
        rows.append(("waits for copies", found.offload_s, f"of {show_seconds(found.copied_s)} of copying to the host"))
    rows += [("optimizer", found.optimizer_s, ""), ("host, once a step", found.host_s, "")]
    rows.append(("a step", found.step_s, f"{show_seconds(found.low_s)} to {show_seconds(found.high_s)}"))
    return [(name, show_seconds(part), f"{part / found.step_s:.0%}", more) for name, part, more in rows]
