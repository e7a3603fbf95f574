"""Pretraining: the next token of every document."""

from __future__ import annotations

from torch import Tensor

from shardwise.data.batch import MicroBatch
from shardwise.methods.loss import Loss, Output, linear_cross_entropy, token_losses
from shardwise.models.attention import MaskSpec


def mask(batch: MicroBatch) -> MaskSpec:
    """Causal, and within documents where the batch tells them."""
    cut = {"row_length": batch.row_length, "bounds": batch.bounds, "reached": batch.reached}
    return MaskSpec(documents=batch.documents, longest=batch.longest, filled=batch.filled, **cut)  # type: ignore[arg-type]


def finish(hidden: Tensor, head: Output, batch: MicroBatch, denominator: float, *, chunk_tokens: int) -> Loss:
    """Sum of the token losses over ``denominator``, which is the supervised tokens of the whole optimizer step."""
    return Loss(linear_cross_entropy(hidden, head, batch.labels, chunk_tokens) / denominator)


def score(hidden: Tensor, head: Output, batch: MicroBatch, *, chunk_tokens: int) -> Tensor:
    """The loss of each token [b,s] in nats, 0 where there is no label; without gradients."""
    return token_losses(hidden, head, batch.labels, chunk_tokens)
