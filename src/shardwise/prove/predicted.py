"""The input and the targets of a layer that predicts a further token, told token by token: the right answer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.data.micro_batch import MicroBatch
from shardwise.data.pack import IGNORE
from shardwise.methods.loss import mask
from shardwise.models.hf_model import Model
from shardwise.spec.records import FURTHER


def logits_of(
    model: Model, weights: Mapping[str, Tensor], batch: MicroBatch, *, further: bool
) -> tuple[Tensor, dict[str, float | Tensor]]:
    """The logits [b,s,V] of the next tokens and, where a layer predicts ``further`` ones, by the name under which it is
    reported the mean of its loss."""
    given = dict[str, Tensor]()
    told = dict[str, float | Tensor]()
    targets = None
    if further:
        given["following"], targets = further_tokens(batch)
    logits = torch.func.functional_call(model, dict(weights), (batch.ids, batch.positions, mask(batch)), given)
    if targets is not None:
        logits, others = logits.unbind(2)
        told[FURTHER] = functional.cross_entropy(others.flatten(0, 1), targets.flatten())
    return logits, told


def further_tokens(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """The id behind each token and the label of the one behind it. Where that is not in its document, or the row does
    not say it, the id is the token's label, or 0, and there is no label."""
    b, s = batch.ids.shape
    ends = [] if batch.documents is None else batch.documents.tolist()
    following, targets = torch.zeros_like(batch.ids), torch.full_like(batch.labels, IGNORE)
    for row in range(b):
        borders = sorted({s, *(end - row * s for end in ends if row * s < end <= row * s + s)})
        for place in range(s):
            stop = next(border for border in borders if place < border)
            if place + 1 < stop:
                following[row, place] = batch.ids[row, place + 1]
            elif batch.labels[row, place] != IGNORE:
                following[row, place] = batch.labels[row, place]
            if place + 2 < stop or (place + 2 == stop == s):
                targets[row, place] = batch.labels[row, place + 1]
    return following, targets
