"""The loss with what lies between its products compiled, against the eager one and torch's cross-entropy."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch.nn import functional as F

from shardwise.data.micro_batch import MicroBatch
from shardwise.methods import pretrain
from shardwise.methods.loss import Between, Output, linear_cross_entropy, losses_and_gradient
from shardwise.runtime import passes
from shardwise.runtime.metrics.measure import highest_bytes
from shardwise.spec.plan import Batch, Plan
from shardwise.spec.recipe import Method
from shardwise.techniques.compile import suspended
from tests.drift.compiled import compiler
from tests.models.llama import relative

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about its own tracing

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.02}
TOKENS, CHUNK, VOCABULARY = 21, 8, 301
"""Three chunks, the last one shorter."""


def between() -> Between:
    return torch.compile(losses_and_gradient, fullgraph=True)


def inputs(dtype: torch.dtype, tokens: int = TOKENS, hidden_size: int = 16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, labels of which some are ignored, and a factor for each token."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, hidden_size, dtype=torch.float64) for n in (tokens, VOCABULARY))
    labels = torch.randint(0, VOCABULARY, (tokens,))
    labels[:3] = labels[-1] = -100
    labels[3:4], labels[4:5] = 0, VOCABULARY - 1
    factors = torch.randn(tokens).to(torch.promote_types(dtype, torch.float32))
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels, factors


def found(head: Output, hidden: Tensor, labels: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    loss = linear_cross_entropy(hidden, head, labels, CHUNK, factors)
    return loss.detach(), *torch.autograd.grad(loss * 0.37, (hidden, head.weight))


def exact(head: Output, hidden: Tensor, labels: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    wide, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, head.weight))
    logits = wide @ weight.mT
    if head.soft_cap:
        logits = torch.tanh(logits / head.soft_cap) * head.soft_cap
    losses = F.cross_entropy(logits, labels, reduction="none")
    loss = losses.sum() if factors is None else losses @ factors.double()
    return loss.detach(), *torch.autograd.grad(loss * 0.37, (wide, weight))


CASES = list(product(["inductor", "aot_eager"], TOLERANCES, [None, 3.0], [False, True]))


@pytest.mark.matrix
@pytest.mark.parametrize(("backend", "dtype", "soft_cap", "weighed"), CASES, ids=str)
def test_compiled_loss_and_gradients(backend: str, dtype: torch.dtype, soft_cap: float | None, weighed: bool) -> None:
    """To the rounding of the type; and the compiled ones are as near to the exact ones as the eager."""
    hidden, weight, labels, factors = inputs(dtype)
    given, eager = factors if weighed else None, Output(weight, soft_cap)
    with compiler(backend) as graphs:
        ours = found(replace(eager, between=between()), hidden, labels, given)
    assert 0 < graphs[backend] <= 2, "one for whole chunks, one for any that is shorter"
    plain, right = found(eager, hidden, labels, given), exact(eager, hidden, labels, given)
    for one, other, truth in zip(ours, plain, right, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert relative(one.double(), other.double()) < TOLERANCES[dtype]
        assert relative(one.double(), truth) < max(1e-6, 1.5 * relative(other.double(), truth))


def test_numbers_of_tokens_make_few_graphs(caplog: pytest.LogCaptureFixture) -> None:
    """Whole chunks, shorter ones, one token alone, and a single short chunk."""
    counts = []
    with compiler("aot_eager") as graphs, caplog.at_level(logging.WARNING, logger="torch"):
        made = between()
        for tokens in (21, 16, 22, 17, 5, 30, 31, 41, 7, 28, 33, 3):
            hidden, weight, labels, _ = inputs(torch.float32, tokens)
            found(Output(weight, between=made), hidden, labels, None)
            counts.append(graphs["aot_eager"])
    assert counts[0] == counts[2] == 2 and counts[4] == counts[-1] <= 4
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_large_logits_and_nothing_supervised(soft_cap: float | None) -> None:
    hidden, weight, labels, _ = inputs(torch.float32)
    with compiler("aot_eager"):
        head = Output((weight * 300).detach().requires_grad_(), soft_cap, between=between())
        loss, *gradients = found(head, hidden, torch.full_like(labels, -100), None)
        assert float(loss) == 0 and not any(gradient.any() for gradient in gradients)
        for one, truth in zip(found(head, hidden, labels, None), exact(head, hidden, labels, None), strict=True):
            assert bool(one.isfinite().all()) and relative(one.double(), truth) < 1e-4


@pytest.mark.prove
@inductor.patch({"cpp.threads": 1})
def test_a_chunk_makes_its_logits_their_gradient_and_no_wide_tensor() -> None:
    """Products have buffers of their own, as large as a processor's kernels want them, and smaller than a wide tensor;
    of several threads each has some."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    hidden, weight, labels, _ = inputs(torch.bfloat16, 1024, hidden_size=4)

    def run(head: Output) -> Any:
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            linear_cross_entropy(hidden, head, labels, 512).backward()
        return profile

    with compiler("inductor"):
        head = Output(weight, between=between())
        linear_cross_entropy(hidden, head, labels, 512).backward()
        measured, eager = run(head), run(Output(weight))
    torch.set_num_threads(threads)
    made = [event.nbytes() for event in measured.profiler.kineto_results.events() if event.name() == "[memory]"]
    narrow = 2 * 512 * VOCABULARY
    assert made.count(narrow) == 4 and max(made) < 2 * narrow
    assert highest_bytes(measured) < 2.2 * narrow < 5 * narrow < highest_bytes(eager)


def test_the_plan_says_whether_the_loss_is_compiled() -> None:
    """And what suspends compilation, as the step whose traffic is measured does, suspends that of the loss."""
    hidden, weight, labels, _ = inputs(torch.float32)
    batch: Any = MicroBatch(labels, labels, labels, None, TOKENS)
    plan = Plan(batch=Batch(loss_chunk_tokens=CHUNK))
    with compiler("eager") as graphs:
        plain = passes.finish_of(Method(), plan)
        assert isinstance(plain, partial) and plain.func is pretrain.finish
        finish = passes.finish_of(Method(), replace(plan, compile=True))
        with suspended():
            values = [each(hidden, Output(weight), batch, 7.0).value for each in (plain, finish)]
        assert torch.equal(*values) and not graphs
        torch.testing.assert_close(finish(hidden, Output(weight), batch, 7.0).value, values[0])
        assert graphs["eager"] == 2
