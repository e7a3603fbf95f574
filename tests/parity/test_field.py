"""What broke elsewhere where tensor parallelism met another axis, each row by its id in the list of such reports: the
ranks' copies of a parameter drift apart, a gradient lacks a sum, a norm counts twice. Gradients are compared, since
Adam hides constant factors; all weights are random, biases and adapters' B too; each case has its twin without the
axis."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from shardwise.distributed.meshes import meshes
from shardwise.distributed.slices import local
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.roles import is_linear
from shardwise.prove import parity, workload
from shardwise.prove.pool import RankPool
from shardwise.prove.workload import random_everywhere
from shardwise.runtime.build import build
from shardwise.runtime.passes import finish_of
from shardwise.runtime.reduce import count_supervised
from shardwise.runtime.step import StepRules, step
from shardwise.spec.plan import Lora, Plan
from shardwise.spec.recipe import Method, Recipe, Run
from shardwise.techniques.lora import adapters
from shardwise.techniques.nf4.fourbit import quantise
from shardwise.techniques.quantised import NF4_PARTS
from tests.parity import drawn
from tests.parity.cases import GEMMA, QWEN
from tests.parity.test_fp64 import holds
from tests.parity.test_tp import EVEN, plan
from tests.parity.test_tp_adapters import WIDE

HEADS = replace(QWEN, name="tiny-heads", intermediate_size=28, mlp_bias=True)
"""Norms of heads, and biases."""
ADAPTERS = Lora(4, 8.0, frozen="fp64")
STEPS = 20


@dataclass
class Seen:
    """Of one rank: the names of what is trained, before the first step and after the last; all weights then, whole;
    losses and norms of each step; and at the end what it holds of each parameter that all ranks of a tensor-parallel
    group hold, and the bytes of everything that it holds."""

    trained: tuple[set[str], set[str]]
    begun: dict[str, Tensor]
    ended: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    copies: dict[str, Tensor]
    held: dict[str, int]

    def changed(self) -> set[str]:
        assert self.begun.keys() == self.ended.keys()
        return {name for name, value in self.begun.items() if not torch.equal(value, self.ended[name])}


def watched(rank: int, world: int, spec: ModelSpec, of: Plan, steps: int) -> Seen:
    job, groups = parity.job_of(spec, of, steps), meshes(of.layout, "cpu")
    recipe = Recipe(optim=workload.OPTIM, run=Run(seed=job.seed))
    state = build(recipe, spec, of, groups, torch.device("cpu"), random_everywhere)
    named = state.parameters()
    begun, trained = everything(named), trained_names(named)
    rules = StepRules(of, groups, workload.OPTIM, parity.MAX_STEPS, finish_of(Method(), of))
    losses, norms = [], []
    for number in range(steps):
        batches = parity.share_of_rank(job.batch(number), groups, of)
        tokens, _ = count_supervised(groups, sum(batch.supervised_tokens() for batch in batches))
        stats = step(state, batches, tokens, rules)
        losses.append(stats.loss)
        norms.append(stats.grad_norm)
    named = state.parameters()
    copies = {name: local(p.detach()).clone() for name, p in named.items() if _copied(p)}
    held = {name: local(p.detach()).nbytes for name, p in named.items()}
    return Seen((trained, trained_names(named)), begun, everything(named), losses, norms, copies, held)


def everything(named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parity.full(parameter.detach()) for name, parameter in named.items()}


def trained_names(named: dict[str, nn.Parameter]) -> set[str]:
    return {name for name, parameter in named.items() if parameter.requires_grad}


def _copied(parameter: nn.Parameter) -> bool:
    """Whether tensor-parallel ranks hold the same of it; the axis is the mesh's last."""
    return isinstance(parameter, DTensor) and isinstance(parameter.placements[-1], Replicate)


def seen(ranks: RankPool, spec: ModelSpec, of: Plan, steps: int = STEPS) -> list[Seen]:
    return ranks.run(watched, spec, of, steps, world=of.layout.world)


def alike(found: list[Seen]) -> set[str]:
    """The parameters of which both ranks of the first group hold copies, which must have the same bits."""
    first, second = found[:2]
    assert first.copies.keys() == second.copies.keys()
    for name, kept in first.copies.items():
        assert torch.equal(kept, second.copies[name]), name
    return set(first.copies)


def gradients_hold(ranks: RankPool, spec: ModelSpec, *plans: Plan) -> None:
    """As the plain loop has them; and the twin's, without the axis, too."""
    both = [*plans, *(replace(of, layout=replace(of.layout, tp=1), sequence_parallel=False) for of in plans)]
    holds(drawn.prove(ranks, spec, both), both)


@pytest.mark.prove
def test_t5_the_last_norm_under_sequence_parallelism(ranks: RankPool) -> None:
    of = plan("ddp", 1, 2, sequence=True)
    assert {"norm.weight", "layers.0.mlp_norm.weight"} <= alike(seen(ranks, EVEN, of))
    gradients_hold(ranks, EVEN, of)


@pytest.mark.prove
def test_t6_what_is_used_on_a_share_of_the_heads(ranks: RankPool) -> None:
    of = plan("ddp", 1, 2, sequence=False)
    assert "layers.0.attention.q_norm.weight" in alike(seen(ranks, HEADS, of))
    gradients_hold(ranks, HEADS, of)


@pytest.mark.prove
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_t7_copies_of_norms_biases_and_adapters(ranks: RankPool, sequence: bool) -> None:
    adapted = replace(plan("ddp", 1, 2, sequence=sequence), lora=ADAPTERS)
    assert {"layers.0.mlp.gate.lora_a.weight", "layers.0.mlp.down.lora_b.weight"} <= alike(seen(ranks, HEADS, adapted))
    trained = plan("ddp", 1, 2, sequence=sequence)
    assert "layers.0.mlp.down.bias" in alike(seen(ranks, HEADS, trained))
    gradients_hold(ranks, HEADS, adapted, trained)


@pytest.mark.prove
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero3", marks=pytest.mark.prove)])
def test_t8_the_norm_of_gradients_and_what_is_clipped(ranks: RankPool, strategy: str) -> None:
    """The same bits on every rank, and one process's norm; gradients are clipped in every step."""
    of = plan(strategy, 2, 2, sequence=True)
    found = seen(ranks, HEADS, of, 5)
    assert all(other.norms == found[0].norms for other in found)
    assert workload.OPTIM.max_grad_norm is not None and min(found[0].norms) > workload.OPTIM.max_grad_norm
    gradients_hold(ranks, HEADS, of)


@pytest.mark.prove
def test_t11_the_loss_has_the_same_bits_on_the_ranks_of_a_group(ranks: RankPool) -> None:
    """Its logits are cut; those that are gathered are in tests/runtime/test_own_tp.py."""
    found = seen(ranks, EVEN, plan("ddp", 1, 2, sequence=False), 5)
    assert found[0].losses == found[1].losses
    gradients_hold(ranks, GEMMA, plan("ddp", 1, 2, sequence=False))


@pytest.mark.prove
def test_t14_fewer_key_heads_than_ranks(ranks: RankPool) -> None:
    of = plan("ddp", 1, 4, sequence=True)
    assert {"layers.0.attention.k.weight", "layers.0.attention.v.bias"} <= alike(seen(ranks, HEADS, of))
    gradients_hold(ranks, HEADS, of)


@pytest.mark.prove
def test_t15_adapters_begin_alike_over_any_number_of_ranks(ranks: RankPool) -> None:
    """Bit by bit, as everything else does: what a rank draws does not depend on its share."""
    begun = [
        seen(ranks, HEADS, replace(plan("ddp", 1, tp, sequence=tp > 1), lora=ADAPTERS), 1)[0].begun for tp in (1, 2, 4)
    ]
    for other in begun[1:]:
        assert begun[0].keys() == other.keys()
        for name, value in begun[0].items():
            assert torch.equal(value, other[name]), name


@pytest.mark.prove
def test_t16_adapters_under_sequence_parallelism(ranks: RankPool) -> None:
    """Each copy has the gradient of all tokens, and none stays as it was."""
    of = replace(plan("ddp", 1, 2, sequence=True), lora=ADAPTERS)
    found = seen(ranks, EVEN, of)
    copies = [name for name in alike(found) if ".lora_" in name]
    assert copies and not any(torch.equal(found[0].copies[name], found[0].begun[name]) for name in copies)
    gradients_hold(ranks, EVEN, of)


@pytest.mark.prove
@pytest.mark.parametrize("lora", [ADAPTERS, replace(ADAPTERS, targets=("k", "down"), dora=True)], ids=["all", "some"])
def test_t19_what_is_trained_is_what_was_asked(ranks: RankPool, lora: Lora) -> None:
    """The same names on every rank of every layout, before a step and after; and the step changes these and no other
    weight."""
    asked = set(adapters(EVEN, lora))
    for strategy, dp, tp in (("ddp", 1, 1), ("ddp", 1, 2), ("zero3", 2, 2)):
        for rank in seen(ranks, EVEN, replace(plan(strategy, dp, tp, sequence=tp > 1), lora=lora), 1):
            assert rank.trained == (asked, asked)
            assert rank.changed() == asked


@pytest.mark.prove
def test_k4_what_is_cut_twice_is_put_together_in_order(ranks: RankPool) -> None:
    """By FSDP2 and by tensor parallelism along one dim, bit by bit as one process: ids that neither divides, and rows
    and columns that tensor parallelism divides, as it must, into shares that FSDP2 does not. Checkpoints that other
    layouts read are in test_tp_pairwise.py."""
    odd = replace(HEADS, name="tiny-odd", hidden_size=21, intermediate_size=26)
    (alone,) = seen(ranks, odd, plan("ddp", 1, 1, sequence=False), 1)
    twice = plan("zero3", 2, 2, sequence=True)
    for rank in seen(ranks, odd, twice, 1):
        assert rank.begun.keys() == alone.begun.keys()
        for name, value in alone.begun.items():
            assert torch.equal(value, rank.begun[name]), name
    gradients_hold(ranks, odd, twice)


@pytest.mark.prove
def test_k7_what_is_in_four_bits_stays_so_when_it_is_sharded(ranks: RankPool) -> None:
    """Over either axis and both, the bytes of all ranks together are those of the whole weight, quantised here; steps
    change the adapters and none of these; a rank holds its share of them and no other copy of the weight."""
    small = replace(ADAPTERS, nf4=True)
    plans = [
        replace(plan(strategy, dp, tp, sequence=tp > 1), lora=small)
        for strategy, dp, tp in (("ddp", 1, 2), ("zero3", 2, 1), ("zero3", 2, 2))
    ]
    shapes = {name: shape for name, shape in parameter_shapes(WIDE).items() if is_linear(name)}
    for of in plans:
        for rank in seen(ranks, WIDE, of, 3):
            for name, shape in shapes.items():
                in_four_bits(rank, name, shape, of)
            assert rank.changed() == set(adapters(WIDE, small))
    gradients_hold(ranks, WIDE, *plans)


def in_four_bits(rank: Seen, name: str, shape: tuple[int, ...], of: Plan) -> None:
    """Half a byte an element, with the sizes of blocks not much more."""
    layer = name.removesuffix("weight")
    assert name not in rank.held
    for word, right in zip(NF4_PARTS, quantise(drawn.whole(name, WIDE)), strict=True):
        for found in (rank.begun[layer + word], rank.ended[layer + word]):
            assert found.dtype == torch.uint8 and torch.equal(found, right), layer + word
    share = prod(shape) // (of.layout.tp * of.layout.dp_shard)
    assert rank.held[f"{layer}codes"] == share // 2
    assert sum(rank.held[layer + word] for word in NF4_PARTS) <= 0.55 * share, layer
