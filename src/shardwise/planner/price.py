"""The estimate of a plan: the fullest rank's memory by category, what travels, and the arithmetic of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from shardwise import techniques
from shardwise.models.config import ModelSpec
from shardwise.models.room import expert_room
from shardwise.planner.event_log import folded_pass
from shardwise.planner.overhead import standing_bytes
from shardwise.planner.schedule import around, micro_batches
from shardwise.planner.seconds.rates import Rates, own_traits, rates_of
from shardwise.planner.sheets import sheet_of
from shardwise.planner.spans import Span
from shardwise.planner.unit_passes import Passes
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import MEMORY_CATEGORIES, Estimate, Optim, Pipeline, Plan, Traffic
from shardwise.spec.rank_kind import rank_kind_of, rank_kinds
from shardwise.spec.sheet import EXPERT_ROWS, Sheet, is_control

KEPT_PASSES = 4096
"""How many are remembered: more than the plans that are priced for one page."""


def price(spec: ModelSpec, plan: Plan, cluster: Cluster, *, most: float = float("inf")) -> Plan:
    """``plan`` of a model with its estimate: that of the kind of rank that is fullest, or of the first that takes more
    than ``most`` of the memory."""
    found = []
    for _, estimate in of_each_kind(spec, plan, cluster):
        found.append(estimate)
        if estimate.share > most:
            return replace(plan, estimate=estimate)
    fullest = max(found, key=lambda estimate: estimate.share)
    on_host = max(found, key=lambda estimate: estimate.host_bytes)  # perhaps another rank of a pipeline
    beside: dict[str, Any] = {key: vars(on_host)[key] for key in ("host", "host_bytes", "host_capacity_bytes")}
    beside |= {key: max(vars(one)[key] for one in found) for key in ("disk_bytes", "written_bytes")}
    fullest = replace(fullest, **beside)
    if plan.layout.pp > 1:
        rates = rates_of(plan, cluster, own_traits())
        fullest = replace(fullest, flops_per_step=_flops_of_stages(spec, plan, cluster, rates))
    return replace(plan, estimate=replace(fullest, disk_capacity_bytes=cluster.disk_bytes if fullest.disk_bytes else 0))


def of_each_kind(spec: ModelSpec, plan: Plan, cluster: Cluster) -> Iterator[tuple[Sheet, Estimate]]:
    """Yield the sheet of each kind of rank, rewritten by the plan, with the estimate of that kind alone."""
    rates = rates_of(plan, cluster, own_traits())
    known = _passes()
    computes = replace(plan, optim=Optim(), estimate=Estimate(), why={}, model="", cluster="")
    for costed in of_rank_kinds(spec, plan):
        alike = costed.units, costed.order, costed.rank_kind.stages, costed.rank_kind.coordinate("ring"), costed.trained
        key = computes, cluster.kind, costed.tied, alike
        if key not in known:
            if len(known) >= KEPT_PASSES:
                known.clear()
            known[key] = micro_batches(costed, plan, Passes.of(costed, plan, cluster.kind, rates))
        span = around(costed, plan, known[key])
        memory = by_category(span.top, costed, spec, plan, cluster)
        host = {name: size for name, size in span.on("host").top.items() if size}
        if cluster.kind == "cpu":  # the device is the host
            memory["offloaded"], host = sum(host.values()), {}
        yield (
            costed,
            Estimate(
                memory,
                sum(memory.values()),
                cluster.device.memory_bytes,
                traffic(span, plan),
                flops([span], plan.layout),
                host=host,
                host_bytes=sum(host.values()) * cluster.devices_per_node,
                host_capacity_bytes=cluster.host_memory_bytes if host else 0,
                disk_bytes=span.on("disk").top_bytes * cluster.devices_per_node,
                written_bytes=_written_bytes(span) * cluster.devices_per_node,
            ),
        )


def by_category(
    held: Mapping[str, int], costed: Sheet, spec: ModelSpec, plan: Plan, cluster: Cluster
) -> dict[str, int]:
    """Bytes by the page's categories: what the events of a step ``held`` at a moment, and what stands all the time."""
    memory = {name: held.get(name, 0) for name in MEMORY_CATEGORIES} | standing_bytes(costed, plan, cluster)
    if rows := held.get(EXPERT_ROWS, 0):
        memory["activations"] += rows
        memory["expert reserve"] = round((most_rows(spec, plan) - 1) * rows)
    return memory


def _written_bytes(span: Span) -> int:
    """Return the bytes that a rank writes to disks in a step: what is copied there, and all of the optimizer's once;
    frozen weights not at all."""
    copied = sum(times * copy.bytes for copy, times in span.copied.items() if copy.target == "disk")
    kept = span.on("disk").top.items()
    return copied + sum(size for name, size in kept if name not in ("activations", "frozen"))


@cache
def _passes() -> dict[object, Span]:
    """A store of what micro-batches come to, for all searches: in bytes, messages and operations the same on every
    device of a kind and under every optimizer."""
    return {}


def most_rows(spec: ModelSpec, plan: Plan) -> float:
    """Return for how many even shares of the rows a rank's memory is reserved: no more than its experts' capacity."""
    if spec.experts.expert_capacity is None:
        return plan.expert_imbalance
    even = plan.batch.seq_len * spec.experts.experts_per_token / spec.experts.num_experts
    return min(plan.expert_imbalance, expert_room(spec, plan.batch.seq_len) / even)


def _flops_of_stages(spec: ModelSpec, plan: Plan, cluster: Cluster, rates: Rates) -> int:
    """Return the operations of all ranks of a pipeline, whatever the schedule: those of the model without it."""
    whole = unstaged(plan)
    sheet = techniques.cost(sheet_of(spec, whole), whole)
    passes, total = Passes.of(sheet, whole, cluster.kind, rates), 0
    for unit, times in sheet.repeated():
        both = (piece for which in (Passes.forward, Passes.backward) for piece in folded_pass(which, passes, unit))
        total += times * sum(piece.flops for piece in both if isinstance(piece, Span))
    return total * plan.batch.accumulation * plan.layout.size("stage")


def along_pipeline(spec: ModelSpec, plan: Plan) -> Iterator[Sheet]:
    """The sheets of the ranks of a pipeline that are first on all other axes, rewritten by the plan."""
    stages = plan.stages(spec.num_hidden_layers)
    for rank in range(plan.layout.pp):
        rank_kind = rank_kind_of(plan.layout.rank({"pp": rank}), plan.layout, stages)
        yield techniques.cost(sheet_of(spec, plan, rank_kind), plan)


def unstaged(plan: Plan) -> Plan:
    """The plan without a pipeline: what all of its stages together do."""
    if plan.layout.pp == 1:
        return plan
    return replace(plan, layout=replace(plan.layout, pp=1, v_shaped=False), pipeline=Pipeline())


def of_rank_kinds(spec: ModelSpec, plan: Plan) -> Iterator[Sheet]:
    """Yield the sheet of each kind of rank, rewritten by the plan."""
    first, stages = techniques.cost(sheet_of(spec, plan), plan), plan.stages(spec.num_hidden_layers)
    yield first
    differ = plan.offload.optimizer_fraction < 1  # of some stages one block more is on the host than of others
    for rank_kind in rank_kinds(plan.layout, stages, techniques.cuts(first, plan), every_stage=differ)[1:]:
        yield techniques.cost(sheet_of(spec, plan, rank_kind), plan)


def traffic(span: Span, plan: Plan) -> tuple[Traffic, ...]:
    """Return what one rank sends in a step, by axis and kind: payload bytes of all calls together."""
    total: Counter[tuple[str, str, str]] = Counter()
    count: Counter[tuple[str, str, str]] = Counter()
    for send, calls in span.sent.items():
        category = "control" if is_control(send.kind, send.bytes) else send.category
        name = (plan.layout.called(send.axis), send.kind, category)
        total[name] += send.bytes * calls
        count[name] += calls
    return tuple(Traffic(*name, total[name], count[name], link(name[0], plan.layout)) for name in total)


def link(axis: str, layout: Layout) -> str:
    """``node`` where all ranks of a group share one, else ``network``."""
    return "network" if layout.ranks_per_node % layout.reach(axis) else "node"


def flops(stages: Iterable[Span], layout: Layout) -> int:
    """Floating-point operations of a step over all ranks, recomputation included: those of a rank of each pipeline
    stage, on as many ranks as a stage has."""
    return sum(span.flops for span in stages) * layout.size("stage")
