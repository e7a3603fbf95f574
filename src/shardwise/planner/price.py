"""From a plan to its estimate: the fullest rank's memory by category, what travels, and the arithmetic of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import ceil

from shardwise import techniques
from shardwise.methods.head import products
from shardwise.planner.replay import replay
from shardwise.planner.schedule import schedule
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import MEMORY_CATEGORIES, Estimate, Plan, Traffic
from shardwise.spec.sheet import Sheet, Unit
from shardwise.techniques import optim, shard

CUDA_RESERVE_BYTES = 2 * 2**30
"""What a CUDA context and NCCL's buffers take beside torch's allocations: 1 to 3 GiB are seen."""
CUBLAS_WORKSPACE_BYTES = 2 * 32 * 2**20
"""Under ``CUBLAS_WORKSPACE_CONFIG=:4096:8``, of the thread that runs forward and of the one that runs backward."""
MOST_MULTIPROCESSORS = 192
"""No GPU has more (H100: 132, B200: 148, RTX PRO 6000: 188); what is computed from it is an upper bound."""
FLASH_ROWS = 128
"""By which FlashAttention may lengthen a sequence."""


def price(sheet: Sheet, plan: Plan, cluster: Cluster) -> Plan:
    """``plan`` with its estimate. Rank 0 is the fullest: no slice of a tensor is larger than the first."""
    costed = techniques.cost(sheet, plan)
    result = replay(schedule(costed, plan))
    reserve = reserve_bytes(costed, plan, cluster)
    memory = {name: result.peak.get(name, 0) for name in MEMORY_CATEGORIES} | {"reserve": reserve}
    peak, sent = sum(memory.values()), traffic(costed, plan.layout)
    return replace(plan, estimate=Estimate(memory, peak, cluster.device.memory_bytes, sent, flops(costed, plan)))


def reserve_bytes(costed: Sheet, plan: Plan, cluster: Cluster) -> int:
    """Memory of a device that no tensor of the step takes. Deterministic: cuBLAS's workspaces, and in the backward of
    attention a copy of the fp32 sums of q's gradient for each multiprocessor that would else add to the same ones
    (FlashAttention 2 divides them by the heads of a micro-batch)."""
    if cluster.kind != "cuda" or not plan.deterministic:
        return CUDA_RESERVE_BYTES if cluster.kind == "cuda" else 0
    b, rows, copies = plan.batch.micro_batch_size, plan.batch.seq_len + FLASH_ROWS, 0
    for unit in costed.blocks if plan.precision.compute in ("bf16", "fp16") else ():
        for op in unit.backward:
            if op.kind == "attention" and op.allocates:
                _, heads, _, head_dim = unit.tensors[op.allocates[0]].shape
                more = ceil(MOST_MULTIPROCESSORS / (b * int(heads))) - 1
                copies = max(copies, more * 4 * b * rows * int(heads) * ceil(int(head_dim) / 32) * 32)
    return CUDA_RESERVE_BYTES + CUBLAS_WORKSPACE_BYTES + copies


def least_bytes(costed: Sheet, plan: Plan, cluster: Cluster) -> int:
    """A bound below the peak that needs no replay: what is alive for the whole step, and beside it all gradients, as at
    the end, or what stands between forward and backward of the last micro-batch."""
    state = sum(optim.state_bytes(costed, plan, 0).values()) + reserve_bytes(costed, plan, cluster)
    gathered = waiting = 0
    if plan.shard.strategy == "ddp" or plan.layout.dp == 1:
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
        kept = {tensor for i in block.kept_ops for tensor in block.forward[i].allocates}
        ops = block.forward_plain if block.recompute else block.forward
        made = {tensor for op in ops for tensor in op.allocates}
        made -= {tensor for op in ops for tensor in op.frees} - kept
        inside = sum(block.tensors[tensor].bytes(b, s) for tensor in made - {block.output})
        read = block.recompute or block.input in block.saved
        left.append(inside + (block.tensors[block.input].bytes(b, s) if read and block.input >= 0 else 0))
    return sum(left[kind] for kind in costed.order)


def collectives(sheet: Sheet) -> Counter[tuple[str, str, str, int]]:
    """(axis, kind, category, bytes of a call) -> calls in a step, on each rank."""
    found: Counter[tuple[str, str, str, int]] = Counter()
    for items, times in [*((unit.collectives, times) for unit, times in repeated(sheet)), (sheet.step, 1)]:
        for item in items:
            found[item.axis, item.kind, item.category, item.bytes] += item.count * times
    return found


def repeated(sheet: Sheet) -> list[tuple[Unit, int]]:
    """Every kind of unit with how often it occurs."""
    blocks = [(block, sheet.order.count(kind)) for kind, block in enumerate(sheet.blocks)]
    return [(sheet.stem, 1), *blocks, (sheet.tail, 1)]


def traffic(sheet: Sheet, layout: Layout) -> tuple[Traffic, ...]:
    """What one rank sends in a step, by axis and kind: payload bytes of all calls together."""
    total: Counter[tuple[str, str, str]] = Counter()
    count: Counter[tuple[str, str, str]] = Counter()
    for (axis, kind, category, size), calls in collectives(sheet).items():
        total[axis, kind, category] += size * calls
        count[axis, kind, category] += calls
    return tuple(Traffic(*name, total[name], count[name], link(name[0], layout)) for name in total)


def link(axis: str, layout: Layout) -> str:
    """``node`` where all ranks of a group share one, else ``network``."""
    name, _, part = axis.partition("/")
    spans = {"dp_replicate": layout.dp, "dp_shard": int(part or layout.dp_shard)}  # neighbours in rank that it reaches
    return "network" if spans.get(name, layout.world) > layout.ranks_per_node else "node"


def seen(s: int, window: int | None) -> int:
    """Twice the pairs of query and key in a causal sequence of ``s``, roughly: s * s, or less with a window."""
    return s * s if window is None or window >= s else window * (2 * s - window)


def flops(sheet: Sheet, plan: Plan) -> int:
    """Floating-point operations of a step over all ranks, recomputation included."""
    b, s = plan.batch.micro_batch_size, plan.batch.seq_len
    vocabulary, hidden = (int(dim) for dim in sheet.stem.weights[0].shape)
    total = 2 * products(sheet, plan) * vocabulary * hidden * b * s
    for unit, times in repeated(sheet):
        passes = [unit.forward, unit.backward]
        if unit.recompute:
            passes.append(tuple(op for i, op in enumerate(unit.forward) if i not in unit.kept_ops))
        scale = {"b*s": b * s, "b*s*s": b * seen(s, unit.window)}
        total += times * sum(op.flops * scale[op.per] for ops in passes for op in ops)
    return total * plan.batch.accumulation * plan.layout.dp
