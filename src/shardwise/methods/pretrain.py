"""Pretraining: the next token of every document."""

from __future__ import annotations

from torch import Tensor

from shardwise.data.batch import MicroBatch
from shardwise.methods.loss import linear_cross_entropy, token_losses
from shardwise.models.attention import MaskSpec
from shardwise.models.foreign import Model


def mask(batch: MicroBatch) -> MaskSpec:
    """Causal, and within documents where the batch tells them."""
    return MaskSpec(documents=batch.documents, longest=batch.longest)


def loss(model: Model, batch: MicroBatch, chunk_tokens: int, denominator: Tensor | float) -> Tensor:
    """Sum of the token losses over ``denominator``, which is the supervised tokens of the whole optimizer step."""

    def finish(hidden: Tensor, weight: Tensor) -> Tensor:
        cap = model.spec.final_soft_cap
        return linear_cross_entropy(hidden, weight, batch.labels, chunk_tokens, cap) / denominator

    return model(batch.ids, batch.positions, mask(batch), finish)


def evaluate(model: Model, batch: MicroBatch, chunk_tokens: int) -> Tensor:
    """The loss of each token [b,s] in nats, 0 where there is no label; without gradients."""

    def finish(hidden: Tensor, weight: Tensor) -> Tensor:
        return token_losses(hidden, weight, batch.labels, chunk_tokens, model.spec.final_soft_cap)

    return model(batch.ids, batch.positions, mask(batch), finish)
