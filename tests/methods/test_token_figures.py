"""Token accuracy and entropy beside the loss, against torch's argmax and its Categorical on whole logits in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

from shardwise.data.micro_batch import MicroBatch
from shardwise.methods import pretrain
from shardwise.methods.loss import Output, loss_and_figures, losses_and_gradient
from shardwise.runtime import passes
from shardwise.spec.plan import Batch, Plan
from shardwise.spec.recipe import Method
from shardwise.spec.records import TOKEN_FIGURES
from tests.drift.compiled import compiler

TOKENS, CHUNK, VOCABULARY = 43, 8, 101


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight, and labels, half of which are what the model would choose, some ignored."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 16, dtype=torch.float64).to(dtype) for n in (TOKENS, VOCABULARY))
    labels = torch.randint(0, VOCABULARY, (TOKENS,))
    labels[::2] = (hidden @ weight.mT).argmax(-1)[::2]
    labels[:3] = labels[-1] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def expected(head: Output, hidden: Tensor, labels: Tensor) -> list[float]:
    logits = (hidden @ head.weight.mT).detach().double()
    if head.soft_cap is not None:
        logits = torch.tanh(logits / head.soft_cap) * head.soft_cap
    learnt = labels != -100
    right = (logits.argmax(-1) == labels)[learnt].sum()
    return [float(right), float(Categorical(logits=logits[learnt]).entropy().sum())]


CASES = list(product([torch.float64, torch.float32, torch.bfloat16], [None, 3.0], [False, True], [CHUNK, 1000]))


@pytest.mark.parametrize(("dtype", "soft_cap", "compiles", "chunk_tokens"), CASES, ids=str)
def test_accuracy_and_entropy(dtype: torch.dtype, soft_cap: float | None, compiles: bool, chunk_tokens: int) -> None:
    """Of the same logits: the count is equal, the entropy to the rounding of fp32. Loss and gradients do not change."""
    hidden, weight, labels = inputs(dtype)
    with compiler("aot_eager"):
        between = torch.compile(losses_and_gradient, fullgraph=True) if compiles else None
        head = Output(weight, soft_cap, between=between)
        bare, none = loss_and_figures(hidden, head, labels, chunk_tokens)
        loss, told = loss_and_figures(hidden, replace(head, figures=TOKEN_FIGURES), labels, chunk_tokens)
        gradients = [torch.autograd.grad(each, (hidden, weight)) for each in (bare, loss)]
    assert none.numel() == 0 and told.dtype == torch.float64 and not told.requires_grad
    assert torch.equal(bare, loss) and all(map(torch.equal, *gradients))
    right, entropy = expected(head, hidden, labels)
    assert 10 < right < TOKENS - 10
    assert told[0] == right and float(told[1]) == pytest.approx(entropy, rel=1e-12 if dtype == torch.float64 else 1e-5)


def test_as_trl_has_it() -> None:
    """SFTTrainer's mean_token_accuracy and entropy, written out from its compute_loss: over the tokens with a label of
    a batch whose labels are still to be shifted."""
    torch.manual_seed(1)
    logits, labels = torch.randn(2, 9, 17, dtype=torch.float64), torch.randint(0, 17, (2, 9))
    labels[0, :4] = -100
    shift_logits, shift_labels = logits[..., :-1, :], labels[..., 1:]
    mask = shift_labels != -100
    accuracy = ((shift_logits.argmax(-1) == shift_labels) & mask).sum().item() / mask.sum().item()
    logps = shift_logits.log_softmax(-1)
    entropy = (-(logps.exp() * logps).sum(-1) * mask).sum() / mask.sum()
    batch: Any = SimpleNamespace(labels=shift_labels)
    head, count = Output(torch.eye(17, dtype=torch.float64)), float(mask.sum())
    found = pretrain.finish(shift_logits, head, batch, count, chunk_tokens=5, figures=TOKEN_FIGURES).figures
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {"mean_token_accuracy": accuracy, "entropy": float(entropy)}, rel=1e-12
    )


def test_nothing_supervised() -> None:
    hidden, weight, labels = inputs(torch.float32)
    head = Output(weight, figures=TOKEN_FIGURES)
    assert loss_and_figures(hidden, head, torch.full_like(labels, -100), CHUNK)[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("compiles", [False, True])
def test_the_plan_says_what_is_told(compiles: bool) -> None:
    """Accuracy always, entropy if the recipe asks for it, both over the tokens of the whole step."""
    hidden, weight, labels = inputs(torch.float32)
    batch: Any = MicroBatch(labels, labels, labels, None, TOKENS)
    right, entropy = expected(Output(weight), hidden, labels)
    plan = Plan(batch=Batch(loss_chunk_tokens=CHUNK), compile=compiles)
    with compiler("eager"):
        plain, told = (
            passes.finish_of(Method(), of)(hidden, Output(weight), batch, 100.0).figures
            for of in (plan, replace(plan, entropy=True))
        )
    assert {name: float(value) for name, value in plain.items()} == {"mean_token_accuracy": right / 100}
    assert float(told["entropy"]) == pytest.approx(entropy / 100, rel=1e-5) and tuple(told) == TOKEN_FIGURES
    bare = partial(pretrain.finish, denominator=100.0, chunk_tokens=CHUNK)
    assert not bare(hidden, Output(weight), batch).figures
