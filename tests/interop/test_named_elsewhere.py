"""The names of a plan elsewhere: a system that lacks a part of it is not named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.interop.emit_files import named_elsewhere
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Offload, Pipeline, Plan, Shard

SHARDED = Layout(dp_shard=16, ranks_per_node=8)
STAGES = Layout(dp_shard=4, pp=2)


@pytest.mark.parametrize(
    ("layout", "strategy", "others", "words", "systems"),
    [
        (SHARDED, "ddp", {}, ("DistributedDataParallel", "stage 0", "no distributed optimizer"), "PDM"),
        (SHARDED, "zero1", {}, ("fully_shard with", "stage 1", "--use-distributed-optimizer"), "PDM"),
        (SHARDED, "zero2", {}, ("SHARD_GRAD_OP", "stage 2", "optim_grads"), "PDM"),
        (SHARDED, "zero3", {}, ("fully_shard", "stage 3", "optim_grads_params"), "PDM"),
        (Layout(dp_replicate=2, dp_shard=4), "zero3", {}, ("HYBRID_SHARD", "MiCS"), "PD"),
        (Layout(dp_replicate=2, dp_shard=4), "zero1", {}, ("--num-distributed-optimizer-instances 2",), "PM"),
        (Layout(dp_shard=4, tp=2), "zero1", {}, ("--tensor-model-parallel-size 2", "AutoTP", "stage 1"), "PDM"),
        (Layout(dp_shard=4, tp=2), "zero1", {"sequence_parallel": True}, ("--sequence-parallel",), "PM"),
        (Layout(dp_shard=4, tp=2), "zero3", {}, ("parallelize_module",), "PM"),
        (Layout(tp=8), "ddp", {}, ("--tensor-model-parallel-size 8",), "PDM"),
        (STAGES, "zero1", {}, ("--pipeline-model-parallel-size 2", "PipelineModule"), "PDM"),
        (STAGES, "zero3", {}, ("Schedule1F1B", "fully_shard"), "P"),
        (STAGES, "ddp", {"pipeline": Pipeline("zbv", 2)}, ("ScheduleZBVZeroBubble",), "P"),
        (STAGES, "ddp", {"pipeline": Pipeline("interleaved", 4)}, ("--num-virtual-stages-per-pipeline-rank 4",), "PM"),
        (Layout(dp_shard=4, cp=2, ulysses=2), "zero3", {"cp_kind": "ulysses"}, ("Ulysses", "a2a"), "DM"),
        (Layout(dp_shard=4, cp=2), "zero3", {"cp_kind": "ring"}, ("context_parallel", "p2p"), "PM"),
        (Layout(dp_shard=4, ep=2), "zero1", {}, ("AutoEP", "--expert-model-parallel-size 2"), "PDM"),
        (
            SHARDED,
            "zero3",
            {"offload": Offload("host", "host")},
            ("offload_optimizer to cpu", "cpu_checkpointing"),
            "D",
        ),
        (SHARDED, "zero1", {"offload": Offload("host")}, ("--optimizer-cpu-offload",), "DM"),
        (Layout(), "ddp", {"offload": Offload("nvme", weights="nvme")}, ("offload_param to nvme", "stage 3"), "D"),
        (Layout(), "ddp", {}, ("one device",), ""),
        (STAGES, "zero2", {"pipeline": Pipeline("dualpipev", 2), "offload": Offload("host")}, ("none of",), ""),
    ],
)
def test_a_system_is_named_where_it_has_all_of_the_plan(
    layout: Layout, strategy: str, others: dict[str, object], words: tuple[str, ...], systems: str
) -> None:
    plan = replace(Plan(), layout=layout, shard=Shard(strategy), **others)  # type: ignore[arg-type]
    told = named_elsewhere(plan)
    assert "ZeroRedundancyOptimizer" not in told  # it holds gradients whole
    assert told.startswith("elsewhere  ") and all(word in told for word in words)
    assert [name for name in ("PyTorch", "DeepSpeed", "Megatron") if f"{name}: " in told] == [
        name for name in ("PyTorch", "DeepSpeed", "Megatron") if name[0] in systems
    ]
