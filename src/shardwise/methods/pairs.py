"""Losses of pairs of answers, a chosen and a rejected one, from the log-probability of each.

A pair's loss is a function of two numbers, so its derivative is known once they are. So tokens are scored without
gradients first, a chunk at a time; then each token's loss is weighed with the derivative by its answer's
log-probability, and the gradient of that sum is the loss's own. The logits of all tokens never exist; the output layer
is multiplied once more.

Where ranks have some tokens each of the same rows, what is summed over an answer's tokens is summed over the ranks too,
in one all-reduce. Each then has the gradient of its own tokens, and an equal share of the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid

from shardwise import methods
from shardwise.data.micro_batch import MicroBatch
from shardwise.methods.loss import IGNORED, Loss, Output, linear_cross_entropy, token_losses
from shardwise.spec.recipe import Method
from shardwise.spec.records import PREFERENCE_FIGURES


@dataclass(frozen=True)
class Answers:
    """The answers of p pairs, chosen and rejected, [p,2] in fp64: ``logps``, the log-probability of each, the sum over
    its tokens; ``references``, the same under the initial model, 0 where the method has no reference; ``counts``, the
    number of its tokens, 1 where the method does not ask."""

    logps: Tensor
    references: Tensor
    counts: Tensor

    @property
    def means(self) -> Answers:
        """The answers with log-probabilities a token."""
        return Answers(self.logps / self.counts, self.references / self.counts, torch.ones_like(self.counts))

    @property
    def margins(self) -> Tensor:
        """The log-odds [p] by which the model prefers the chosen answer, less those of the reference."""
        chosen, rejected = (self.logps - self.references).unbind(1)
        return chosen - rejected


PairLosses = Callable[[Answers, Method], Tensor]
"""The loss of each pair [p], of which autograd makes the derivative by ``logps``."""


def finish(
    hidden: Tensor, head: Output, batch: MicroBatch, denominator: float, *, chunk_tokens: int, method: Method
) -> Loss:
    """The sum of the pairs' losses over ``denominator``, which is the number of pairs of the whole optimizer step."""
    assert batch.answers is not None and batch.references is not None
    scored = token_losses(hidden, head, batch.labels, chunk_tokens)
    answers = answers_of(scored, batch, method, head.group)
    answers.logps.requires_grad_()
    with torch.enable_grad():
        losses = losses_of(answers, method)
        (derivatives,) = torch.autograd.grad(losses.sum(), answers.logps)
    none = not len(batch.references)  # all is padding
    factors = torch.zeros_like(scored) if none else -derivatives.flatten()[batch.answers].to(scored.dtype)
    ranks = 1 if head.group is None else dist.get_world_size(head.group)
    value = losses.detach().sum().to(scored.dtype) / ranks
    weighed = linear_cross_entropy(hidden, head, batch.labels, chunk_tokens, factors)
    means = torch.cat([figures(answers, method).sum(1) / ranks, answer_tokens(batch)]) / denominator
    return Loss((weighed - weighed.detach() + value) / denominator, dict(zip(PREFERENCE_FIGURES, means, strict=True)))


def losses_of(answers: Answers, method: Method) -> Tensor:
    """The loss of each pair [p]."""
    losses: Tensor = methods.program(method.spec).losses(answers, method)
    return losses


def answers_of(losses: Tensor, batch: MicroBatch, method: Method, group: dist.ProcessGroup | None = None) -> Answers:
    """Sum up the losses of a micro-batch's tokens [b,s] by answer. They may be some of each row, the others on the
    other ranks of ``group``. Where all is padding there is no pair."""
    assert batch.answers is not None and batch.references is not None
    columns = [-losses, batch.labels != IGNORED] if method.spec.counted else [-losses]
    pairs, number = len(batch.references), batch.answers.flatten()
    none = losses.new_zeros(2 * max(1, pairs), dtype=torch.float64)
    sums = torch.stack([none.index_add(0, number, column.flatten().double()) for column in columns])
    if group is not None:
        dist.all_reduce(sums, group=group)
    logps, *counts = sums.view(len(columns), -1, 2)[:, :pairs]
    return Answers(logps, batch.references, counts[0].clamp_min(1) if counts else torch.ones_like(logps))


def figures(answers: Answers, method: Method) -> Tensor:
    """The first figures that ``PREFERENCE_FIGURES`` names, of each pair [6,p], as TRL defines them: an answer's reward
    is beta times what its log-probability has over the reference's; both are means over its tokens where the method
    averages."""
    told = answers.means if method.spec.averaged else answers
    logps = told.logps.detach()
    chosen, rejected = (method.beta * (logps - told.references)).unbind(1)
    margins = chosen - rejected
    return torch.stack([chosen, rejected, margins, (margins > 0).to(margins.dtype), *logps.unbind(1)])


def answer_tokens(batch: MicroBatch) -> Tensor:
    """Count the tokens of chosen and of rejected answers [2] in fp64 that this rank has and that are trained on."""
    assert batch.answers is not None
    learnt = (batch.labels != IGNORED).double()
    rejected = (learnt * (batch.answers % 2)).sum()
    return torch.stack([learnt.sum() - rejected, rejected])


def smoothed(logits: Tensor, method: Method) -> Tensor:
    """-log sigmoid of logits [p], where a share ``label_smoothing`` of the pairs is taken to be the wrong way round."""
    wrong = method.label_smoothing
    return -(1 - wrong) * logsigmoid(logits) - wrong * logsigmoid(-logits)
