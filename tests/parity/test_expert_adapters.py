"""Adapters of experts: a plan's training is that of the plain loop, in which each expert's weight is one matrix
W + scale B A, in float64, whether ranks have all experts or some."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardwise.distributed.meshes import meshes
from shardwise.models.config import ModelSpec, with_fields
from shardwise.models.roles import is_expert
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.prove.workload import random_everywhere
from shardwise.runtime.build import build
from shardwise.runtime.export import export_adapter
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Pipeline, Plan, Remat, Shard
from shardwise.spec.recipe import Recipe, Run
from shardwise.techniques.lora import adapters
from tests.parity import drawn
from tests.parity.cases import FP64, ROWS, SEQ_LEN, UNTIED
from tests.parity.test_fp64 import holds

MIX = with_fields(
    UNTIED,
    name="tiny-mix",
    intermediate_size=28,
    num_experts=4,
    experts_per_token=2,
    expert_size=12,
    expert_bias=True,
    router_bias=True,
    shared_expert_size=16,
    shared_expert_gate=True,
    dense_layers=(1,),
)
WIDE = with_fields(MIX, name="tiny-wide-mix", hidden_size=64, intermediate_size=128, head_dim=32, expert_size=64)
WIDE = with_fields(WIDE, shared_expert_size=128, initializer_range=0.1)
NAMED = replace(MIX, family="qwen2_moe")
LORA = Lora(3, 6.0, frozen="fp64")
SMALL = replace(LORA, nf4=True)


def plan(lora: Lora, layout: Layout, strategy: str = "zero3", remat: str = "none", accumulation: int = 1) -> Plan:
    batch = Batch(ROWS // layout.dp // accumulation, accumulation, SEQ_LEN)
    shard, kept = Shard(strategy), Remat(remat)  # type: ignore[arg-type]
    return Plan(layout, batch, shard, FP64, remat=kept, sequence_parallel=layout.tp > 1, lora=lora)


TWO = [
    plan(LORA, Layout(dp_shard=2, ep=2), "zero3", "selective", 2),
    plan(LORA, Layout(tp=2, ep=2), "ddp", "none", 2),
    plan(LORA, Layout(tp=2), "ddp", "full"),
    replace(plan(LORA, Layout(tp=2), "ddp"), sequence_parallel=False),
    plan(LORA, Layout(dp_replicate=2), "ddp", "selective"),
    plan(LORA, Layout(dp_shard=2), "zero1", "full", 2),
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


def prove(ranks: RankPool, spec: ModelSpec, plans: list[Plan]) -> None:
    """In few steps: B is not zero at first, so that A has a gradient."""
    holds(drawn.prove(ranks, spec, plans, 2), plans)


@pytest.mark.matrix
@pytest.mark.parametrize("which", range(len(TWO)))
def test_two_ranks(ranks: RankPool, which: int) -> None:
    prove(ranks, MIX, TWO[which : which + 1])


@pytest.mark.big
def test_four_ranks(ranks: RankPool) -> None:
    prove(ranks, MIX, FOUR)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("which", range(len(SMALL_TWO)))
def test_in_four_bits(ranks: RankPool, which: int) -> None:
    """The plain loop quantises each expert by itself."""
    prove(ranks, WIDE, SMALL_TWO[which : which + 1])


@pytest.mark.big
def test_in_four_bits_on_four_ranks(ranks: RankPool) -> None:
    prove(ranks, WIDE, SMALL_FOUR)


@pytest.mark.prove
def test_every_expert_of_every_layout_trains_its_own(ranks: RankPool) -> None:
    """Whatever the layout the same parameters have a gradient, and of each adapter every expert's is not zero."""
    expected = adapters(MIX, LORA)
    plans = TWO[:4]
    for rank in ranks.run(drawn.train_on_rank, MIX, plans, 1, world=2):
        for trace in rank:
            assert {name: tuple(value.shape) for name, value in trace.gradients.items()} == expected
            for name, value in trace.gradients.items():
                each = value.unflatten(0, (MIX.experts.num_experts if is_expert(name) else 1, -1))
                assert bool(each.flatten(1).any(1).all()), name


@pytest.mark.big
def test_what_is_dropped_is_dropped_again(ranks: RankPool) -> None:
    """Recomputed or not the losses are the same to the bit, also where the ranks of a tp group send other rows."""
    dropping = replace(LORA, dropout=0.4)
    for layout in (Layout(dp_shard=2, ep=2), Layout(tp=2, ep=2), Layout(tp=2)):
        plans = [plan(dropping, layout, remat=remat) for remat in ("none", "full", "selective")]
        plans += [plan(LORA, layout)]
        for whole, again, some, kept in ranks.run(drawn.train_on_rank, MIX, plans, 3, world=2):
            assert whole.losses == again.losses == some.losses != kept.losses


def write(rank: int, world: int, directory: Path, of: Plan) -> None:
    """What a run writes at its end."""
    groups = meshes(of.layout, "cpu")
    state = build(Recipe(run=Run(seed=1)), NAMED, of, groups, parity.CPU, random_everywhere)
    parameters = {name: parameter.detach() for name, parameter in state.parameters().items()}
    assert of.lora is not None
    export_adapter(parameters, of.lora, NAMED, None, directory)


@pytest.mark.prove
def test_every_layout_writes_the_same(ranks: RankPool, tmp_path: Path) -> None:
    layouts = (Layout(dp_shard=2), Layout(dp_shard=2, ep=2), Layout(dp_shard=2, tp=2, ep=2))
    for place, layout in enumerate(layouts):
        ranks.run(write, tmp_path / str(place), plan(LORA, layout), world=layout.world)
    first, *others = (load_file(tmp_path / str(place) / "adapter_model.safetensors") for place in range(len(layouts)))
    assert first["base_model.model.model.layers.0.mlp.experts.lora_B.weight"].shape == (20, 3 * 4)
    assert all(other.keys() == first.keys() for other in others)
    assert all(torch.equal(other[name], first[name]) for other in others for name in first)
