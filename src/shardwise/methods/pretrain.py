"""Pretraining: the next token of every document."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from shardwise.data.micro_batch import MicroBatch
from shardwise.methods.loss import Loss, Output, loss_and_figures
from shardwise.spec.records import FURTHER


def finish(
    hidden: Tensor,
    head: Output,
    batch: MicroBatch,
    denominator: float,
    *,
    chunk_tokens: int,
    figures: tuple[str, ...] = (),
) -> Loss:
    """Sum of the token losses over ``denominator``, which is the supervised tokens of the whole optimizer step, and of
    the ``figures`` that the plan reports, as means over the same tokens: the share of them that the model would have
    chosen itself, which TRL calls mean_token_accuracy, and the entropy of its predictions in nats. Where a layer
    predicts a further token, the mean of its loss over its own targets is added, times its weight, and reported."""
    if head.further is not None and batch.targets is not None:
        return _with_further(hidden, replace(head, figures=figures), batch.targets, denominator, chunk_tokens)
    total, sums = loss_and_figures(hidden, replace(head, figures=figures), batch.labels, chunk_tokens)
    return Loss(total / denominator, dict(zip(figures, sums / denominator, strict=True)))


def _with_further(hidden: Tensor, head: Output, targets: Tensor, denominator: float, chunk_tokens: int) -> Loss:
    """The loss of hidden [..,2d] and targets [..,2]: those of the next token, and of the one after it."""
    assert head.further is not None
    weight, count = head.further
    total, sums = loss_and_figures(hidden, head, targets, chunk_tokens, second=weight * denominator / count)
    *told, own, further = sums
    figures = {name: each / denominator for name, each in zip(head.figures, told, strict=True)}
    return Loss(total / denominator, figures | {FURTHER: further / count}, own / denominator)
