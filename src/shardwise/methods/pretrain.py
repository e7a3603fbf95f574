"""Pretraining: the next token of every document."""

from __future__ import annotations

from torch import Tensor

from shardwise.data.batch import MicroBatch
from shardwise.methods.loss import Loss, Output, linear_cross_entropy


def finish(hidden: Tensor, head: Output, batch: MicroBatch, denominator: float, *, chunk_tokens: int) -> Loss:
    """Sum of the token losses over ``denominator``, which is the supervised tokens of the whole optimizer step."""
    return Loss(linear_cross_entropy(hidden, head, batch.labels, chunk_tokens) / denominator)
