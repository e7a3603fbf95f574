"""What broke mixtures of experts in the field, each by the number it has in the threads that told of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardwise.models.config import ModelSpec, with_fields
from shardwise.prove import parity
from shardwise.prove.distance import apart
from shardwise.prove.fake_run import WorldCounter, measure
from shardwise.prove.pool import RankPool
from shardwise.prove.workload import OPTIM, Setting, random_everywhere
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Precision, Remat, Shard
from tests.parity import drawn, mixture_ranks
from tests.parity.cases import FP64
from tests.parity.mixture_ranks import Favoured
from tests.parity.mixtures import GPT_OSS, MIXTRAL, QWEN2, QWEN3
from tests.parity.test_cp_field import SomeLabels
from tests.parity.test_fp64 import holds

STEPS = 2
LENGTH = 15
proved, big = partial(pytest.param, marks=pytest.mark.prove), partial(pytest.param, marks=pytest.mark.big)


def plan(layout: Layout, strategy: str = "ddp", rows: int = 4, **more: Any) -> Plan:
    """``rows`` a step, in one micro-batch of each rank, by default with sequence parallelism where there is tp."""
    batch = Batch(max(1, rows // layout.dp), 1, LENGTH, loss_chunk_tokens=7)
    made = Plan(layout, batch, Shard(strategy, bucket_bytes=4096), FP64, sequence_parallel=layout.tp > 1)  # type: ignore[arg-type]
    return replace(made, **more)


WHOLE = (
    plan(Layout(tp=2), sequence_parallel=False),
    plan(Layout(tp=4)),
    plan(Layout(dp_shard=2, tp=2), "zero3", sequence_parallel=False),
)
"""Tensor parallelism with ep 1: each rank has the experts whole."""
SPREAD = (
    plan(Layout(tp=2, ep=2)),
    plan(Layout(tp=4, ep=2)),
    plan(Layout(dp_shard=2, tp=2, ep=4), "zero3"),
)
ALIKE = (
    plan(Layout(dp_shard=4, ep=2), "zero3"),
    plan(Layout(dp_replicate=2, dp_shard=2, ep=2)),
    plan(Layout(dp_replicate=2, dp_shard=2, ep=2), "zero3"),
    plan(Layout(dp_shard=4, ep=4), "zero1", remat=Remat("full")),
)
"""Ranks that have the same experts, within a replica and across, and none."""
REPLICATED = plan(Layout(dp_replicate=2, tp=2, ep=2))
THIRTEEN, THREE = Batch(3, 1, 13, loss_chunk_tokens=7), Batch(1, 1, 3)
CASES: dict[str, tuple[ModelSpec, tuple[Plan, ...]]] = {
    "T1 T3 routers and all below, under tp without ep": (QWEN3, WHOLE),
    "T1 T2 routers and all below, under tp with ep": (QWEN3, SPREAD),
    "T4 biases of experts, under tp without ep": (GPT_OSS, WHOLE),
    "T4 biases of experts, under tp with ep": (GPT_OSS, SPREAD),
    "an MLP that all share, under tp without ep": (QWEN2, WHOLE),
    "an MLP that all share, under tp with ep": (QWEN2, SPREAD),
    "ranks of tp have different numbers of tokens": (
        QWEN2,
        (plan(Layout(tp=4, ep=4), batch=THIRTEEN), plan(Layout(dp_shard=2, tp=2, ep=4), "zero3", batch=THIRTEEN)),
    ),
    "E2 one expert a token": (with_fields(QWEN3, experts_per_token=1, normalised_top_k=False), (ALIKE[1], SPREAD[2])),
    "E2 all experts a token": (with_fields(GPT_OSS, experts_per_token=8), ALIKE[::3]),
    "an expert a rank": (with_fields(MIXTRAL, num_experts=4), (ALIKE[3], SPREAD[2])),
}


@pytest.mark.prove
@pytest.mark.parametrize("case", CASES)
def test_it_is_one_process(ranks: RankPool, case: str) -> None:
    """Loss, norm, every first gradient, and weights after two steps."""
    spec, plans = CASES[case]
    holds(drawn.prove(ranks, spec, plans, STEPS), [*plans])


@pytest.mark.prove
def test_a_rank_of_tp_without_a_token(ranks: RankPool) -> None:
    """Three tokens for four ranks, all with labels: of one row the first row's rule would leave one."""
    plans = [plan(Layout(tp=4, ep=ep), batch=THREE) for ep in (1, 4)]
    setting = Setting(rows=SomeLabels(0, 3), draw=random_everywhere)
    holds(parity.prove(ranks, MIXTRAL, plans, STEPS, setting), plans)


@pytest.mark.prove
def test_E1_E2_gradients_of_experts_and_routers_after_plain_descent_too(ranks: RankPool) -> None:
    """AdamW would hide a factor: the last step is one of SGD. Each layer's gradients are there, and are not zero."""
    setting = Setting(draw=random_everywhere, sgd=True)
    holds(parity.prove(ranks, GPT_OSS, ALIKE[:2], 1, setting), [*ALIKE[:2]])
    right = parity.plain(parity.job_of(GPT_OSS, ALIKE[0], 1, setting)).gradients
    of_experts = [name for name in right if ".mlp." in name]
    assert len(of_experts) == 2 * 8 and all(right[name].abs().max() > 1e-6 for name in of_experts)


FAVOURED: dict[str, tuple[Favoured, int]] = {
    "all tokens to one expert": (Favoured((5,), 1_000.0), 1),
    "all tokens to the experts of one rank": (Favoured((4, 5)), 2),
    "half of the experts have none": (Favoured((1, 2, 4, 7)), 2),
}
"""How routers begin, and how many experts a token goes to."""


@pytest.mark.matrix
@pytest.mark.parametrize("case", FAVOURED)
def test_E3_an_expert_with_no_token_has_gradients_of_zeros_and_decays(ranks: RankPool, case: str) -> None:
    """On whichever rank it is: not None, with which an optimizer would pass it over."""
    draw, k = FAVOURED[case]
    spec = with_fields(GPT_OSS, experts_per_token=k, normalised_top_k=k > 1)
    setting, job = Setting(draw=draw), parity.job_of(spec, ALIKE[0], STEPS, Setting(draw=draw))
    holds(parity.prove(ranks, spec, [ALIKE[3]], STEPS, setting), [ALIKE[3]])
    [answers] = zip(*ranks.run(mixture_ranks.traces, spec, ALIKE[:1], STEPS, setting, world=4), strict=True)
    idle = [expert for expert in range(8) if expert not in draw.experts]
    kept = 1.0
    for share in (1 / OPTIM.warmup_steps, 1.0):
        kept *= 1 - share * OPTIM.learning_rate * OPTIM.weight_decay
    compared = parity.compare(parity.plain(job), [trace for trace, _ in answers])
    assert not compared.wrong(1e-9), compared
    for trace, _ in answers:
        for name in (f"layers.{layer}.mlp.experts.expert_{x}.weight" for layer in (0, 1) for x in ("gate", "down")):
            begun = job.first(name, tuple(trace.weights[name].shape)).double().unflatten(0, (8, -1))[idle]
            assert not trace.gradients[name].unflatten(0, (8, -1))[idle].any()
            after = trace.weights[name].unflatten(0, (8, -1))[idle]
            assert torch.allclose(after, begun * kept, rtol=1e-12, atol=0.0)


@pytest.mark.prove
def test_E4_S10_norm_and_clipping_are_one_on_every_rank_and_in_every_layout(ranks: RankPool) -> None:
    """Bit by bit on the ranks, to 1e-12 in layouts: sums are taken in another order, in float64."""
    plans = [*ALIKE[:2], SPREAD[1]]
    right = drawn.plain(parity.job_of(QWEN2, plans[0], STEPS))
    assert all(norm > 2 * OPTIM.max_grad_norm for norm in right.norms)
    answers = ranks.run(mixture_ranks.traces, QWEN2, plans, STEPS, drawn.RANDOM, world=4)
    for place, of in enumerate(plans):
        told = {(trace.norms, *factors) for trace, factors in (answer[place] for answer in answers)}
        [(norms, *factors)] = told
        assert norms == pytest.approx(right.norms, rel=1e-12), of
        assert factors == pytest.approx([OPTIM.max_grad_norm / (norm + 1e-6) for norm in right.norms], rel=1e-12), of


@pytest.mark.parametrize("mode", [proved("full"), big("selective")])
def test_E11_recomputation_chooses_the_same_experts(ranks: RankPool, mode: str) -> None:
    """Bit by bit, in bf16, where scores are as near to one another as they come."""
    of = replace(SPREAD[2], precision=Precision("bf16"), remat=Remat(mode))  # type: ignore[arg-type]
    layers = range(QWEN3.num_hidden_layers - len(QWEN3.experts.dense_layers))
    for ids in ranks.run(mixture_ranks.routed, QWEN3, of, world=4):
        assert len(ids) == 2 * len(layers)
        assert all(torch.equal(ids[layer], ids[-1 - layer]) for layer in layers)


@pytest.mark.parametrize("of", [proved(ALIKE[0]), big(SPREAD[2])], ids=["dp", "tp"])
def test_E13_ranks_that_come_late_or_have_nothing_to_learn(ranks: RankPool, of: Plan) -> None:
    """Labels are the first row's alone. However ranks lag, none waits for ever, and the numbers are the same."""
    setting = Setting(rows=SomeLabels(2, 9, rows=1), draw=random_everywhere)
    found = ranks.run(mixture_ranks.sleepy, QWEN3, of, STEPS, setting, world=4)
    compared = parity.compare(parity.plain(parity.job_of(QWEN3, of, STEPS, setting)), found)
    assert not compared.wrong(1e-9)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("spec", "of"),
    [
        pytest.param(GPT_OSS, ALIKE[2], id="E14 replicas of experts that are spread"),
        pytest.param(QWEN2, ALIKE[1], id="E14 replicas that are sharded over nothing", marks=pytest.mark.big),
        pytest.param(GPT_OSS, REPLICATED, id="T1 replicas, and routers of ranks of tp", marks=pytest.mark.prove),
    ],
)
def test_replicas_are_alike_after_each_of_twenty_steps(ranks: RankPool, spec: ModelSpec, of: Plan) -> None:
    """Bit by bit: whatever two ranks hold of the same piece; each piece moves in every step."""
    answers = ranks.run(mixture_ranks.held, spec, of, 20, world=4)
    assert not [*apart(answers)]
    copies = Counter(piece for answer in answers for piece in answer[0])
    experts = {count for piece, count in copies.items() if ".experts." in piece}
    assert experts == {of.layout.size("dp_replicate") * (1 if of.sharded else of.layout.size("expert_fsdp"))}
    for answer in answers:
        for before, after in pairwise(answer):
            assert before.keys() == after.keys() and all(before[piece] != after[piece] for piece in before)


@pytest.mark.parametrize("compute", [proved("bf16"), big("fp32")])
def test_S13_the_same_steps_twice(ranks: RankPool, compute: str) -> None:
    """The same bits: of losses, gradients, and weights after two steps."""
    plans = [replace(of, precision=Precision(compute=compute)) for of in (SPREAD[2],)]  # type: ignore[arg-type]
    for answer in ranks.run(mixture_ranks.twice, QWEN2, plans, world=4):
        for first, again in answer:
            assert (first.losses, first.norms, first.held) == (again.losses, again.norms, again.held)
            assert all(torch.equal(grad, again.gradients[name]) for name, grad in first.gradients.items())


Calls = list[tuple[tuple[int, ...], str]]
"""The ranks of a group, and what it did, one after another."""


def calls_of(rank: int, of: Plan) -> Calls:
    """What a rank of a fake world sends in two steps."""
    found, sent = Calls(), WorldCounter._sent

    def watched(self: WorldCounter, kind: str, args: Any, out: Any) -> None:
        before = self.sent.copy()
        sent(self, kind, args, out)
        for axis, kind, _ in self.sent - before:
            found.append((next(tuple(own) for own in of.layout.members(axis) if rank in own), kind))

    with patch.object(WorldCounter, "_sent", watched):
        measure(QWEN3, of, rank)
    return found


@pytest.mark.parametrize("of", [proved(SPREAD[2]), big(ALIKE[2])], ids=["tp", "hybrid"])
def test_S14_ranks_use_the_groups_that_they_share_in_one_order(of: Plan) -> None:
    """Two ranks that are in two groups and begin with different ones wait for each other for ever under NCCL."""
    calls = [calls_of(rank, replace(of, precision=Precision("bf16"))) for rank in range(of.layout.world)]
    assert len({group for own in calls for group, _ in own}) >= 4
    for (one, mine), (other, theirs) in combinations(enumerate(calls), 2):
        both = [[call for call in own if {one, other} <= {*call[0]}] for own in (mine, theirs)]
        assert both[0] == both[1] != [], (one, other)
