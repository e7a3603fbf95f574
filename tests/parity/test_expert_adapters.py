"""Adapters of experts: a plan's training is that of the plain loop, in which each expert's weight is one matrix
W + scale B A, in float64, whether ranks have all experts or some."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardwise.models.roles import is_expert
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Pipeline, Plan, Remat, Shard
from shardwise.techniques.lora import adapters
from tests.parity import drawn
from tests.parity.cases import FP64, ROWS, SEQ_LEN, UNTIED
from tests.parity.test_fp64 import holds

MIX = replace(
    UNTIED,
    name="tiny-mix",
    intermediate_size=28,
    experts=4,
    experts_per_token=2,
    expert_size=12,
    expert_bias=True,
    router_bias=True,
    shared_expert_size=16,
    shared_expert_gate=True,
    dense_layers=(1,),
)
WIDE = replace(MIX, name="tiny-wide-mix", hidden_size=64, intermediate_size=128, head_dim=32, expert_size=64)
WIDE = replace(WIDE, shared_expert_size=128, initializer_range=0.1)
LORA = Lora(3, 6.0, frozen="fp64")
SMALL = replace(LORA, nf4=True)


def plan(lora: Lora, layout: Layout, strategy: str = "zero3", remat: str = "none", accumulation: int = 1) -> Plan:
    batch = Batch(ROWS // layout.dp // accumulation, accumulation, SEQ_LEN)
    shard, kept = Shard(strategy), Remat(remat)  # type: ignore[arg-type]
    return Plan(layout, batch, shard, FP64, remat=kept, sequence_parallel=layout.tp > 1, lora=lora)


TWO = [
    plan(LORA, Layout(dp_replicate=2), "ddp", "selective"),
    plan(LORA, Layout(dp_shard=2), "zero1", "full", 2),
    plan(LORA, Layout(dp_shard=2, ep=2), "zero3", "selective", 2),
    plan(LORA, Layout(tp=2), "ddp", "full"),
    replace(plan(LORA, Layout(tp=2), "ddp"), sequence_parallel=False),
    plan(LORA, Layout(tp=2, ep=2), "ddp", "none", 2),
    plan(replace(LORA, targets=("expert_up", "q")), Layout(dp_shard=2, ep=2), "zero2"),
    replace(plan(LORA, Layout(pp=2), "ddp", accumulation=4), pipeline=Pipeline("1f1b", split=(2, 1))),
]
FOUR = [
    plan(LORA, Layout(dp_shard=4, ep=4), "zero3", "full"),
    plan(LORA, Layout(dp_shard=4, ep=2), "zero1", "selective", 2),
    plan(LORA, Layout(dp_shard=2, dp_replicate=2, ep=2), "zero3"),
    plan(LORA, Layout(dp_shard=2, tp=2, ep=4), "zero3", "selective"),
    plan(LORA, Layout(dp_shard=2, tp=2, ep=2), "ddp"),
]
SMALL_TWO = [
    plan(SMALL, Layout(dp_shard=2, ep=2), "zero3", "full"),
    plan(SMALL, Layout(dp_replicate=2), "ddp", "selective"),
    plan(SMALL, Layout(tp=2), "ddp"),
]
SMALL_FOUR = [
    plan(SMALL, Layout(dp_shard=4), "zero2", "none", 2),
    plan(SMALL, Layout(dp_shard=2, tp=2, ep=2), "zero3", "selective"),
]


def prove(ranks: RankPool, spec: parity.ModelSpec, plans: list[Plan]) -> None:
    holds(drawn.prove(ranks, spec, plans, 3), plans)
