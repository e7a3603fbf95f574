"""Losses of pairs beside DPO's, against the equations of their papers written plainly: transformers' model, pairs one
at a time and without padding, in float64."""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.data.micro_batch import collate
from shardwise.data.pack import Packs
from shardwise.data.stream import Share, evaluation
from shardwise.distributed.meshes import Meshes
from shardwise.methods import pairs
from shardwise.prove.pool import RankPool
from shardwise.runtime import passes
from shardwise.runtime.evaluate import evaluate_pairs
from shardwise.spec.methods import METHODS
from shardwise.spec.plan import Batch, Plan
from shardwise.spec.recipe import Method, Recipe
from tests.methods import dpo_ranks
from tests.methods.test_dpo import (  # noqa: F401
    PAIRS,
    Side,
    exact,
    gradients_are_alike,
    log_probability,
    models,
    packs,
    scored,
    sides,
)

CASES = [
    Method(name="ipo", beta=0.2),
    Method(name="hinge", beta=0.3),
    Method(name="orpo", beta=0.7),
    Method(name="simpo", beta=2.0, gamma=1.2),
    Method(name="simpo", beta=2.0, gamma=1.2, label_smoothing=0.2),
]
Pairs = list[tuple[Side, Side]]


def test_every_method_of_pairs_is_here() -> None:
    """But for dpo, which tests/methods/test_dpo.py has."""
    assert {case.name for case in CASES} == {name for name, spec in METHODS.items() if spec.pairs} - {"dpo"}


def logps(model: nn.Module, both: Pairs, mean: bool) -> tuple[Tensor, Tensor]:
    """Of chosen and of rejected answers [p], the sums over their tokens or the means."""
    found = [
        torch.stack([log_probability(model, (ids, learnt)) / (learnt[1:].sum() if mean else 1) for ids, learnt in side])
        for side in zip(*both, strict=True)
    ]
    return found[0], found[1]


def plain(method: Method, model: nn.Module, first: nn.Module, both: Pairs) -> Tensor:
    """The losses of the pairs [p], as the papers write them."""
    beta, gamma, wrong = method.beta, method.gamma, method.label_smoothing
    if method.name == "hinge":
        (chosen, rejected), known = logps(model, both, mean=False), logps(first, both, mean=False)
        return (1 - beta * ((chosen - known[0]) - (rejected - known[1]))).clamp_min(0)
    chosen, rejected = logps(model, both, mean=True)
    if method.name == "ipo":
        known = logps(first, both, mean=True)
        return ((chosen - rejected) - (known[0] - known[1]) - 1 / (2 * beta)) ** 2
    if method.name == "simpo":
        right, left = (torch.sigmoid(sign * (beta * chosen - beta * rejected - gamma)).log() for sign in (1, -1))
        return -(1 - wrong) * right - wrong * left
    odds = [p.exp() / (1 - p.exp()) for p in (chosen, rejected)]
    return -chosen - beta * torch.sigmoid((odds[0] / odds[1]).log()).log()


@pytest.mark.parametrize("method", CASES, ids=lambda method: f"{method.name} {method.label_smoothing:g}")
@pytest.mark.parametrize("chunk_tokens", [17, 1000])
def test_loss_gradients_and_figures(packs: Packs, chunk_tokens: int, method: Method) -> None:  # noqa: F811
    """Two micro-batches of one step. 1e-10: sums in another order in float64. What is reported is TRL's: rewards are
    beta times the log-probability over the reference's, of means where there is no reference."""
    ours, theirs, first = models(3)
    known = scored(packs, first) if method.spec.reference else packs
    cut, total, told = len(known) // 2, 0.0, Counter[str]()
    for numbers in (range(cut), range(cut, len(known))):
        finish = partial(pairs.finish, denominator=float(PAIRS), chunk_tokens=chunk_tokens, method=method)
        loss = passes.forward([ours], collate([known[k] for k in numbers]), finish)
        loss.value.backward()
        total += loss.value.item()
        told.update({name: float(value) for name, value in loss.figures.items()})
    both = sides(known)
    losses = plain(method, theirs, first, both)
    assert method.name != "hinge" or 0 < (losses == 0).sum() < PAIRS
    expected = losses.mean()
    expected.backward()
    assert abs(total - expected.item()) <= 1e-10 * expected.item()
    gradients_are_alike(ours, theirs)
    with torch.no_grad():
        mine, of_first = (logps(model, both, mean=not method.spec.reference) for model in (theirs, first))
    rewards = [method.beta * (a - b * method.spec.reference) for a, b in zip(mine, of_first, strict=True)]
    figures = (*rewards, rewards[0] - rewards[1], (rewards[0] > rewards[1]).double(), *mine)
    assert list(told) == list(method.spec.figures)
    tokens = [sum(int(learnt[1:].sum()) for _, learnt in answers) / PAIRS for answers in zip(*both, strict=True)]
    assert tokens[0] != tokens[1]
    assert list(told.values()) == pytest.approx([*(float(each.mean()) for each in figures), *tokens], rel=1e-9)


@pytest.mark.parametrize("method", CASES[:4], ids=lambda method: method.name)
def test_of_an_answer_that_is_certain_loss_and_derivatives_are_finite(method: Method) -> None:
    """In fp32 the tokens of an answer that was learnt by heart have a loss of 0: of one answer, the other, or both."""
    logps = torch.tensor([[0.0, -3.0], [-3.0, 0.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    losses = pairs.losses_of(pairs.Answers(logps, torch.zeros(3, 2), torch.ones(3, 2)), method)
    (derivatives,) = torch.autograd.grad(losses.sum(), logps)
    assert bool(losses.isfinite().all()) and bool(derivatives.isfinite().all())


@pytest.mark.parametrize("method", CASES[:4], ids=lambda method: method.name)
def test_validation(packs: Packs, method: Method) -> None:  # noqa: F811
    """Over windows with padding among them."""
    ours, theirs, first = models(2)
    known = scored(packs, first) if method.spec.reference else packs
    plan, recipe = Plan(batch=Batch(loss_chunk_tokens=50), loss=method.spec.loss), Recipe(method=method)
    job: Any = SimpleNamespace(plan=plan, recipe=recipe, device=torch.device("cpu"), meshes=Meshes())
    found = evaluate_pairs(job, [ours], evaluation(known, Share(0, 1, 3)))
    with torch.no_grad():
        losses = plain(method, theirs, first, sides(known))
    assert found.pairs == PAIRS and abs(found.loss - float(losses.mean())) < 1e-10


@pytest.mark.parametrize("method", CASES[:4], ids=lambda method: method.name)
def test_rows_may_be_cut_over_ranks(ranks: RankPool, method: Method) -> None:
    """As tests/methods/test_dpo.py has it: counts of tokens are summed too."""
    [(loss, hidden, weight)] = ranks.run(dpo_ranks.preferred, method, world=1)
    assert float(hidden.norm()) > 1e-3
    found = ranks.run(dpo_ranks.preferred, method, world=3)
    torch.testing.assert_close(sum(each[0] for each in found), loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.cat([each[1] for each in found], 1), hidden, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(sum(each[2] for each in found), weight, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("method", [Method(name="dpo"), *CASES[:4]], ids=lambda method: method.name)
def test_a_rank_may_have_nothing_but_padding(packs: Packs, method: Method) -> None:  # noqa: F811
    """In the last step, where fewer windows are left than there are ranks: a loss, figures and gradients of 0."""
    ours, _, _ = models(1)
    finish = partial(pairs.finish, denominator=float(PAIRS), chunk_tokens=17, method=method)
    loss = passes.forward([ours], collate([packs.padding(), packs.padding()]), finish)
    loss.value.backward()
    assert loss.value.item() == 0 and {float(value) for value in loss.figures.values()} == {0.0}
    assert list(loss.figures) == list(method.spec.figures)
    assert all(each.grad is not None and not each.grad.any() for each in ours.parameters())
