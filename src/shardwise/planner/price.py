"""From a plan to its estimate: the fullest rank's memory by category, what travels, and the arithmetic of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from shardwise import techniques
from shardwise.methods.head import gathers, products
from shardwise.planner.overhead import standing_bytes
from shardwise.planner.replay import replay
from shardwise.planner.schedule import recomputed, schedule
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import MEMORY_CATEGORIES, Estimate, Plan, Traffic
from shardwise.spec.sheet import Op, Sheet, Unit
from shardwise.techniques import optim, shard
from shardwise.techniques.tp_units import SEND


def price(sheet: Sheet, plan: Plan, cluster: Cluster) -> Plan:
    """``plan`` with its estimate. Rank 0 is the fullest: no slice of a tensor is larger than the first."""
    costed = techniques.cost(sheet, plan)
    result = replay(schedule(costed, plan, kind=cluster.kind))
    memory = {name: result.peak.get(name, 0) for name in MEMORY_CATEGORIES} | standing_bytes(costed, plan, cluster)
    peak, sent = sum(memory.values()), traffic(costed, plan)
    return replace(plan, estimate=Estimate(memory, peak, cluster.device.memory_bytes, sent, flops(costed, plan)))


def least_bytes(costed: Sheet, plan: Plan, cluster: Cluster) -> int:
    """A bound below the peak that needs no replay: what is alive for the whole step, and beside it all gradients, as at
    the end, or what stands between forward and backward of the last micro-batch."""
    state = sum(optim.state_bytes(costed, plan, 0).values()) + sum(standing_bytes(costed, plan, cluster).values())
    gathered = waiting = 0
    if not plan.sharded:
        gradients = waiting = sum(shard.gradient_bytes(costed, plan).values())
    else:
        groups = shard.groups(costed, plan).values()
        gradients = waiting = sum(group.gradient_bytes for group in groups)
        if plan.shard.strategy == "zero1":
            waiting = sum(group.accumulated_bytes for group in groups)
        elif plan.layout.dp_replicate > 1:
            waiting = sum(group.reduce_bytes // plan.layout.dp_shard for group in groups)
        if plan.shard.strategy != "zero3":
            gathered = sum(group.wire_bytes for group in groups)
    between = gathered + saved_bytes(costed, plan) + (waiting if plan.batch.accumulation > 1 else 0)
    return state + max(gradients, between)


def saved_bytes(costed: Sheet, plan: Plan) -> int:
    """Activations that stand when forward has ended, by what each block leaves; a block's output counts where the next
    one saves it."""
    b, s = plan.batch.micro_batch_size, plan.batch.seq_len
    left = []
    for block in costed.blocks:
        kept = {tensor for i in block.saved_ops for tensor in block.forward[i].allocates}
        ops = block.forward_plain if block.recompute else block.forward
        made = {tensor for op in ops for tensor in op.allocates}
        made -= {tensor for op in ops for tensor in op.frees} - kept
        inside = sum(block.tensors[tensor].bytes(b, s) for tensor in made - {block.output})
        read = block.recompute or block.input in block.saved
        left.append(inside + (block.tensors[block.input].bytes(b, s) if read and block.input >= 0 else 0))
    return sum(left[kind] for kind in costed.order)


def collectives(sheet: Sheet, plan: Plan) -> Counter[tuple[str, str, str, int]]:
    """(axis, kind, category, bytes of a call) -> calls in a step, on the rank of a costed sheet."""
    found: Counter[tuple[str, str, str, int]] = Counter()
    for items, times in [*((unit.collectives, times) for unit, times in sheet.repeated()), (sheet.step, 1)]:
        for item in items:
            found[item.axis, item.kind, item.category, item.bytes] += item.count * times
    for unit, times in sheet.repeated():
        again = recomputed(unit) if unit.recompute else ()
        for op in (*unit.forward, *again, *unit.backward):
            if op.kind == SEND:
                found["tp", op.name, "activations", _payload(unit, op, plan)] += times * plan.batch.accumulation
    for size in gathers(plan):
        found["tp", "all_gather", "activations", size] += plan.batch.accumulation
    return found


def _payload(unit: Unit, op: Op, plan: Plan) -> int:
    """What a collective over the tensor-parallel ranks gathers, scatters or reduces: the larger of its tensors."""
    b, s = plan.batch.micro_batch_size, plan.batch.seq_len
    return max(unit.tensors[tensor].bytes(b, s) for tensor in (*op.reads, *op.allocates))


def traffic(sheet: Sheet, plan: Plan) -> tuple[Traffic, ...]:
    """What one rank sends in a step, by axis and kind: payload bytes of all calls together."""
    total: Counter[tuple[str, str, str]] = Counter()
    count: Counter[tuple[str, str, str]] = Counter()
    for (axis, kind, category, size), calls in collectives(sheet, plan).items():
        total[axis, kind, category] += size * calls
        count[axis, kind, category] += calls
    return tuple(Traffic(*name, total[name], count[name], link(name[0], plan.layout)) for name in total)


def link(axis: str, layout: Layout) -> str:
    """``node`` where all ranks of a group share one, else ``network``."""
    return "network" if layout.ranks_per_node % layout.reach(axis) else "node"


def seen(s: int, window: int | None) -> int:
    """Twice the pairs of query and key in a causal sequence of ``s``, roughly: s * s, or less with a window."""
    return s * s if window is None or window >= s else window * (2 * s - window)


def flops(sheet: Sheet, plan: Plan) -> int:
    """Floating-point operations of a step over all ranks, recomputation included."""
    b, s = plan.batch.micro_batch_size, plan.batch.seq_len
    vocabulary, hidden = (int(dim) for dim in sheet.stem.weights[0].shape)
    total = 2 * products(sheet, plan) * vocabulary * hidden * b * s
    for unit, times in sheet.repeated():
        passes = [unit.forward, unit.backward]
        if unit.recompute:
            passes.append(tuple(op for i, op in enumerate(unit.forward) if i not in unit.saved_ops))
        scale = {"b*s": b * s, "b*s*s": b * seen(s, unit.window)}
        total += times * sum(op.flops * scale[op.per] for ops in passes for op in ops)
    return total * plan.batch.accumulation * plan.layout.dp * plan.layout.tp
