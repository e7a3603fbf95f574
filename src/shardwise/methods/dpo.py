"""Direct preference optimisation (Rafailov et al., arXiv 2305.18290): the model learns to prefer the
chosen of two answers to the rejected one, more than the initial model (the reference) does.

A pair's margin is m = (log p(chosen) - log p(rejected)) - the same of the reference; its loss is -log sigmoid(beta m).
With label smoothing e, the share of pairs that are the wrong way round, it is that times 1 - e, and -log sigmoid(-beta
m) times e (cDPO, Mitchell 2023).

The derivative of a pair's loss is known once its margin is. So tokens are scored without gradients first, a chunk at a
time; then each token's loss is weighed with its pair's derivative, and the gradient of that sum is the loss's own. The
logits of all tokens never exist; the output layer is multiplied once more.

Where ranks have some tokens each of the same rows, log-probabilities are summed over them before the margin is taken,
in one all-reduce of two fp64 numbers a pair. Each then has the gradient of its own tokens, and an equal share of the
loss.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid

from shardwise.data.batch import MicroBatch
from shardwise.methods.loss import IGNORED, Loss, Output, linear_cross_entropy, token_losses
from shardwise.spec.plan import PREFERENCE_FIGURES
from shardwise.spec.recipe import Method


def finish(
    hidden: Tensor, head: Output, batch: MicroBatch, denominator: float, *, chunk_tokens: int, method: Method
) -> Loss:
    """The sum of the pairs' losses over ``denominator``, which is the number of pairs of the whole optimizer step."""
    assert batch.answers is not None and batch.references is not None
    scored = token_losses(hidden, head, batch.labels, chunk_tokens)
    answers = log_probabilities(scored, batch, head.group)
    margins = margins_of(answers, batch.references)
    grad_margins = margin_gradients(margins, method)
    factors = torch.stack([-grad_margins, grad_margins], 1).flatten()[batch.answers].to(scored.dtype)
    ranks = 1 if head.group is None else dist.get_world_size(head.group)
    value = pair_losses(margins, method).sum().to(scored.dtype) / ranks
    weighed = linear_cross_entropy(hidden, head, batch.labels, chunk_tokens, factors)
    means = figures(answers, batch.references, method).sum(1) / (denominator * ranks)
    means = torch.cat([means, answer_tokens(batch) / denominator])
    return Loss((weighed - weighed.detach() + value) / denominator, dict(zip(PREFERENCE_FIGURES, means, strict=True)))


def log_probabilities(losses: Tensor, batch: MicroBatch, group: dist.ProcessGroup | None = None) -> Tensor:
    """log p(chosen) and log p(rejected) of each pair [p,2] in fp64, from the losses of the tokens [b,s], which may be
    some of a row, the others on the other ranks of ``group``; of no pair where all is padding."""
    assert batch.answers is not None and batch.references is not None
    pairs = len(batch.references)
    sums = losses.new_zeros(2 * max(1, pairs), dtype=torch.float64)
    sums.index_add_(0, batch.answers.flatten(), losses.flatten().double())
    if group is not None:
        dist.all_reduce(sums, group=group)
    return -sums.view(-1, 2)[:pairs]


def margins_of(answers: Tensor, references: Tensor) -> Tensor:
    """How much more than the reference the model prefers the chosen answer [p], from log-probabilities [p,2]."""
    chosen, rejected = (answers - references).unbind(1)
    return chosen - rejected


def figures(answers: Tensor, references: Tensor, method: Method) -> Tensor:
    """What ``PREFERENCE_FIGURES`` names first, of each pair [6,p], as TRL defines it: an answer's reward is beta times
    what its log-probability has over the reference's."""
    chosen, rejected = (method.beta * (answers - references)).unbind(1)
    margins = chosen - rejected
    return torch.stack([chosen, rejected, margins, (margins > 0).to(margins.dtype), *answers.unbind(1)])


def answer_tokens(batch: MicroBatch) -> Tensor:
    """How many tokens of chosen and of rejected answers [2] in fp64 are trained on, of those that this rank has."""
    assert batch.answers is not None
    learnt = (batch.labels != IGNORED).double()
    rejected = (learnt * (batch.answers % 2)).sum()
    return torch.stack([learnt.sum() - rejected, rejected])


def pair_losses(margins: Tensor, method: Method) -> Tensor:
    """The loss of each pair [p] from its margin."""
    scaled, wrong = method.beta * margins, method.label_smoothing
    return -(1 - wrong) * logsigmoid(scaled) - wrong * logsigmoid(-scaled)


def margin_gradients(margins: Tensor, method: Method) -> Tensor:
    """The derivative of :func:`pair_losses` by the margin."""
    scaled, wrong = method.beta * margins, method.label_smoothing
    return method.beta * (wrong * torch.sigmoid(scaled) - (1 - wrong) * torch.sigmoid(-scaled))
