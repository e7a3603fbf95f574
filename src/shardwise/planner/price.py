"""From a plan to its estimate: the fullest rank's memory by category, what travels, and the arithmetic of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from shardwise import techniques
from shardwise.models.config import ModelSpec
from shardwise.planner.overhead import standing_bytes
from shardwise.planner.passes import Passes
from shardwise.planner.schedule import around, micro_batches
from shardwise.planner.seconds.rates import own_traits, rates_of
from shardwise.planner.sheets import sheet_of
from shardwise.planner.spans import Span
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import Layout
from shardwise.spec.place import places
from shardwise.spec.plan import MEMORY_CATEGORIES, Estimate, Plan, Traffic
from shardwise.spec.sheet import Sheet


def price(spec: ModelSpec, plan: Plan, cluster: Cluster) -> Plan:
    """``plan`` of a model with its estimate: that of the fullest of its places."""
    found, passes, rates = [], {}, rates_of(plan, cluster, own_traits())
    for costed in at_places(spec, plan):
        if costed.units not in passes:
            passes[costed.units] = micro_batches(costed, plan, Passes.of(costed, plan, cluster.kind, rates))
        span = around(costed, plan, passes[costed.units])
        memory = {name: span.top.get(name, 0) for name in MEMORY_CATEGORIES} | standing_bytes(costed, plan, cluster)
        sent = traffic(span, plan)
        size = sum(memory.values())
        found.append(Estimate(memory, size, cluster.device.memory_bytes, sent, flops([span], plan.layout)))
    return replace(plan, estimate=max(found, key=lambda estimate: estimate.peak_bytes))


def at_places(spec: ModelSpec, plan: Plan) -> Iterator[Sheet]:
    """The sheet of each place, rewritten by the plan."""
    first = techniques.cost(sheet_of(spec, plan), plan)
    yield first
    for place in places(plan.layout, [range(spec.num_hidden_layers)], techniques.cuts(first, plan))[1:]:
        yield techniques.cost(sheet_of(spec, plan, place), plan)


def traffic(span: Span, plan: Plan) -> tuple[Traffic, ...]:
    """What one rank sends in a step, by axis and kind: payload bytes of all calls together."""
    total: Counter[tuple[str, str, str]] = Counter()
    count: Counter[tuple[str, str, str]] = Counter()
    for send, calls in span.sent.items():
        name = (plan.layout.called(send.axis), send.kind, send.category)
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
