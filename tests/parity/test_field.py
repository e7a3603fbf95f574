"""What broke elsewhere where tensor parallelism met another axis, each row by its id in the list of such reports: the
ranks' copies of a parameter drift apart, a gradient lacks a sum, a norm counts twice. Gradients are compared, since
Adam hides constant factors; all weights are random, biases and adapters' B too; each case has its twin without the
axis."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from shardwise.models.config import ModelSpec
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.runtime.build import build
from shardwise.runtime.passes import finish_of
from shardwise.runtime.reduce import count_supervised
from shardwise.runtime.step import StepRules, step
from shardwise.spec.plan import Lora, Plan
from shardwise.spec.recipe import Method, Recipe, Run
from shardwise.techniques.meshes import meshes
from shardwise.techniques.slices import local
from tests.parity import drawn
from tests.parity.cases import GEMMA, QWEN
from tests.parity.test_fp64 import holds
from tests.parity.test_tp import EVEN, plan

HEADS = replace(QWEN, name="tiny-heads", intermediate_size=28, mlp_bias=True)
"""Norms of heads, and biases."""
ADAPTERS = Lora(4, 8.0, frozen="fp64")
STEPS = 20


@dataclass
class Seen:
    """Of one rank: the names of what is trained, all weights at first, whole; losses and norms of each step; and at the
    end what it holds of each parameter that all ranks of a tensor-parallel group hold."""

    trained: set[str]
    begun: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    copies: dict[str, Tensor]


def watched(rank: int, world: int, spec: ModelSpec, of: Plan, steps: int) -> Seen:
    job, groups = parity.job_of(spec, of, steps), meshes(of.layout, "cpu")
    with drawn.drawn():
        state = build(Recipe(optim=parity.OPTIM, run=Run(seed=job.seed)), spec, of, groups, torch.device("cpu"))
    named = state.parameters()
    begun = {name: parity.full(p.detach()) for name, p in named.items()}
    rules = StepRules(of, groups, parity.OPTIM, parity.MAX_STEPS, finish_of(Method(), of))
    losses, norms = [], []
    for number in range(steps):
        batches = parity.share_of_rank(parity.batch_rows(job, number), groups, of)
        tokens, _ = count_supervised(groups, sum(batch.supervised_tokens() for batch in batches))
        stats = step(state, batches, tokens, rules)
        losses.append(stats.loss)
        norms.append(stats.grad_norm)
    copies = {name: local(p.detach()).clone() for name, p in named.items() if _copied(p)}
    return Seen({name for name, p in named.items() if p.requires_grad}, begun, losses, norms, copies)


def _copied(parameter: nn.Parameter) -> bool:
    """Whether tensor-parallel ranks hold the same of it; the axis is the mesh's last."""
    return isinstance(parameter, DTensor) and isinstance(parameter.placements[-1], Replicate)


def seen(ranks: RankPool, spec: ModelSpec, of: Plan, steps: int = STEPS) -> list[Seen]:
    return ranks.run(watched, spec, of, steps, world=of.layout.world, timeout_s=120)


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


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero3", marks=pytest.mark.prove)])
def test_t8_the_norm_of_gradients_and_what_is_clipped(ranks: RankPool, strategy: str) -> None:
    """The same bits on every rank, and one process's norm; gradients are clipped in every step."""
    of = plan(strategy, 2, 2, sequence=True)
    found = seen(ranks, HEADS, of, 5)
    assert all(other.norms == found[0].norms for other in found)
    assert parity.OPTIM.max_grad_norm is not None and min(found[0].norms) > parity.OPTIM.max_grad_norm
    gradients_hold(ranks, HEADS, of)


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


def test_t19_what_is_trained_is_what_was_asked(ranks: RankPool) -> None:
    for tp in (1, 2):
        of = replace(plan("ddp", 1, tp, sequence=tp > 1), lora=ADAPTERS)
        (rank, *_) = seen(ranks, EVEN, of, 1)
        assert rank.trained and all(".lora_" in name for name in rank.trained)


def test_k4_what_is_cut_twice_is_put_together_in_order(ranks: RankPool) -> None:
    """By FSDP2 and by tensor parallelism along one dim, of sizes that neither divides: bit by bit as one process."""
    (alone,) = seen(ranks, EVEN, plan("ddp", 1, 1, sequence=False), 1)
    for rank in seen(ranks, EVEN, plan("zero3", 2, 2, sequence=True), 1):
        for name, value in alone.begun.items():
            assert torch.equal(value, rank.begun[name]), name


@pytest.mark.prove
def test_k7_what_is_in_four_bits_stays_so_when_it_is_sharded(ranks: RankPool) -> None:
    """The bytes of two ranks together are one process's, and no step changes them."""
    wide = replace(EVEN, name="tiny-nf4", hidden_size=64, intermediate_size=128, num_attention_heads=4, head_dim=16)
    small = replace(ADAPTERS, nf4=True)
    (alone,) = seen(ranks, wide, replace(plan("ddp", 1, 1, sequence=False), lora=small), 1)
    for rank in seen(ranks, wide, replace(plan("zero3", 2, 1, sequence=False), lora=small), 1):
        codes = [name for name in alone.begun if name.endswith(".codes")]
        assert codes
        for name in alone.begun:
            assert torch.equal(alone.begun[name], rank.begun[name]), name
