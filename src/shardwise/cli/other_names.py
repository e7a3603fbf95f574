"""The names that a plan has in PyTorch, DeepSpeed and Megatron. A system is named only where it has all of the plan's
parts, in that combination."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.spec.plan import Plan

PIPELINES = {
    "gpipe": ("ScheduleGPipe", None),
    "1f1b": ("Schedule1F1B", ""),
    "interleaved": ("ScheduleInterleaved1F1B", " --num-virtual-stages-per-pipeline-rank {each}"),
    "interleaved_zb": ("ScheduleInterleavedZeroBubble", None),
    "zbv": ("ScheduleZBVZeroBubble", None),
    "dualpipev": ("ScheduleDualPipeV", None),
}
"""By schedule, PyTorch's class, and what Megatron says besides the number of ranks; None where it has no such."""
COMMUNICATES = {"ring": "p2p", "ulysses": "a2a", "gather": "all_gather", "nested": "a2a+p2p"}
"""Megatron's --cp-comm-type."""
SYSTEMS = ("PyTorch", "DeepSpeed", "Megatron")


def named_elsewhere(plan: Plan) -> str:
    """One line."""
    if plan.layout.world == 1 and not plan.offload.words:
        return "elsewhere  nothing is split, on one device"
    found = []
    for system, parts in zip(SYSTEMS, (_pytorch, _deepspeed, _megatron), strict=True):
        words = list(parts(plan))
        if words and None not in words:
            found.append(f"{system}: {', '.join(filter(None, words))}")
    return f"elsewhere  {' · '.join(found) or 'none of PyTorch, DeepSpeed and Megatron has all of this at once'}"


def _pytorch(plan: Plan) -> Iterator[str | None]:
    layout, strategy = plan.layout, plan.shard.strategy
    hybrid = strategy != "ddp" and layout.dp_replicate > 1
    if layout.size("loss") > 1:
        inside = layout.tp > 1 or layout.pp > 1
        yield {
            "ddp": None if layout.ep > 1 else "replicate" if inside else "DistributedDataParallel",
            "zero1": None if inside or hybrid or layout.ep > 1 else "ZeroRedundancyOptimizer",
            "zero2": "fully_shard with reshard_after_forward=False (SHARD_GRAD_OP)",
            "zero3": "FSDP2's fully_shard (FULL_SHARD)",
        }[strategy]
        yield "on a mesh (replicate, shard), HYBRID_SHARD" if hybrid else ""
    yield "parallelize_module" if layout.tp > 1 else ""
    yield f"pipelining's {PIPELINES[plan.pipeline.schedule][0]}" if layout.pp > 1 else ""
    if layout.cp > 1:
        yield "context_parallel" if plan.cp_kind in ("ring", "gather") and strategy != "ddp" else None
    yield "torchtitan's expert_parallel_degree" if layout.ep > 1 else ""
    if plan.offload.words:
        whole = plan.offload.optimizer == plan.offload.weights == "host" and plan.offload.optimizer_fraction == 1
        yield "CPUOffloadPolicy" if whole and plan.sharded and plan.offload.activations == "none" else None


def _deepspeed(plan: Plan) -> Iterator[str | None]:
    layout, strategy, outside = plan.layout, plan.shard.strategy, plan.offload
    stage = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}[strategy]
    if layout.world == 1:
        stage = 3 if outside.filed or outside.weights != "none" or outside.optimizer_fraction < 1 else 2
    yield f"stage {stage}"
    if strategy != "ddp" and layout.dp_replicate > 1:
        yield "MiCS" if stage == 3 else None
    if layout.tp > 1:
        yield "AutoTP" if stage < 3 and not plan.sequence_parallel and layout.pp == layout.cp == 1 else None
    if layout.pp > 1:
        yield "PipelineModule" if plan.pipeline.schedule == "1f1b" and stage < 2 and layout.tp == 1 else None
    if layout.cp > 1:
        yield "Ulysses" if plan.cp_kind == "ulysses" and layout.ep == 1 else None
    if layout.ep > 1:
        yield "AutoEP" if not outside.words and layout.pp == layout.cp == 1 else None
    yield from _offloaded(plan, stage)


def _offloaded(plan: Plan, stage: int) -> Iterator[str | None]:
    """Return the plan in DeepSpeed's words."""
    outside, where = plan.offload, {"host": "cpu", "nvme": "nvme"}
    if outside.optimizer != "none":
        part = outside.optimizer_fraction < 1
        ratio = f" with ratio {outside.optimizer_fraction:g}" if part else ""
        able = stage == 3 or (stage > 0 and not part and outside.optimizer == "host")
        yield f"offload_optimizer to {where[outside.optimizer]}{ratio}" if able else None
    if outside.weights != "none":
        yield f"offload_param to {where[outside.weights]}" if stage == 3 else None
    if outside.activations != "none":
        yield "cpu_checkpointing" if outside.activations == "host" else None


def _megatron(plan: Plan) -> Iterator[str | None]:
    layout, strategy, outside = plan.layout, plan.shard.strategy, plan.offload
    hybrid, sharding = strategy != "ddp" and layout.dp_replicate > 1, {"zero2": "", "zero3": "_params"}
    if layout.size("loss") > 1:
        if strategy in sharding:
            words = f"--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads{sharding[strategy]}"
            yield words if layout.pp == 1 and not hybrid else None
        else:
            yield "--use-distributed-optimizer" if strategy == "zero1" else "no distributed optimizer"
            yield f"--num-distributed-optimizer-instances {layout.dp_replicate}" if hybrid else ""
    if layout.tp > 1:
        yield f"--tensor-model-parallel-size {layout.tp}" + " --sequence-parallel" * plan.sequence_parallel
    if layout.pp > 1:
        more = PIPELINES[plan.pipeline.schedule][1]
        size = f"--pipeline-model-parallel-size {layout.pp}"
        yield None if more is None else size + more.format(each=plan.pipeline.stages_per_rank)
    if layout.cp > 1:
        yield f"--context-parallel-size {layout.cp} --cp-comm-type {COMMUNICATES[plan.cp_kind]}"
    yield f"--expert-model-parallel-size {layout.ep}" if layout.ep > 1 else ""
    if outside.words:
        able = outside.optimizer == "host" and outside.weights == outside.activations == "none"
        part = f" --optimizer-offload-fraction {outside.optimizer_fraction:g}"
        yield f"--optimizer-cpu-offload{part}" if able and strategy in ("ddp", "zero1") else None
