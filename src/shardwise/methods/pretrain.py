"""Pretraining: the next token of every document."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from shardwise.data.batch import MicroBatch
from shardwise.methods.loss import Loss, Output, loss_and_figures


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
    chosen itself, which TRL calls mean_token_accuracy, and the entropy of its predictions in nats."""
    total, sums = loss_and_figures(hidden, replace(head, figures=figures), batch.labels, chunk_tokens)
    return Loss(total / denominator, dict(zip(figures, sums / denominator, strict=True)))
