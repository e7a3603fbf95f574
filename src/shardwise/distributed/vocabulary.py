"""The embedding and the output layer when each tensor-parallel rank holds some rows of the vocabulary.

Their weight is a DTensor, cut along dim 0 over a mesh of one axis. If their number does not divide the vocabulary, the
last rank has fewer rows, or as many with padding at the end, which is never used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from shardwise.distributed.collectives import Group, stacked
from shardwise.spec.layout import cut


@dataclass(frozen=True)
class Rows:
    """This rank holds the ids from ``first`` up to, but not including, ``stop``. ``most``: rows per rank, padding
    included; ``ids``: the size of the whole vocabulary."""

    first: int
    stop: int
    most: int
    ids: int
    group: Group

    @property
    def rank(self) -> int:
        """The number of this rank within the group."""
        return dist.get_rank(self.group)

    @property
    def held(self) -> int:
        """The number of this rank's rows that are not padding."""
        return self.stop - self.first

    def own(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each id its row on this rank, or 0; and whether this rank holds it."""
        mine = (ids >= self.first) & (ids < self.stop)
        return (ids - self.first).masked_fill_(~mine, 0), mine

    def stacked(self, numbers: Tensor) -> Tensor:
        """All ranks' ``numbers``, which have the same shape, as [ranks,..]."""
        return stacked(numbers, self.group)


def rows(weight: Tensor, ids: int | None = None) -> tuple[Tensor, Rows | None]:
    """This rank's part of a weight [V,d], padding included, and which rows these are; None if every rank holds the
    whole weight. ``ids``: the size of the vocabulary, if the weight itself has rows of padding."""
    if not isinstance(weight, DTensor):
        return weight, None
    [placement] = weight.placements
    if not isinstance(placement, Shard):
        return weight.to_local(), None
    assert placement.dim == 0
    mesh, total = weight.device_mesh, weight.shape[0]
    ids = total if ids is None else ids
    first, stop = cut((0, total), mesh.size(), mesh.get_local_rank())
    assert first < ids, f"{mesh.size()} ranks share {ids} ids, and one has none"
    return weight.to_local(), Rows(first, min(stop, ids), -(-total // mesh.size()), ids, mesh.get_group())


def look_up(ids: Tensor, weight: Tensor, vocabulary: int | None = None) -> Tensor:
    """This rank's rows of ``weight`` for int64 ``ids``, as [*ids.shape,d], and zeros for ids of other ranks: the sum
    over the ranks is the embedding."""
    local, held = rows(weight, vocabulary)
    if held is None:
        return functional.embedding(ids, local)
    own, mine = held.own(ids)
    return functional.embedding(own, local).masked_fill_(~mine.unsqueeze(-1), 0.0)


def logits(hidden: Tensor, weight: Tensor, vocabulary: int | None = None) -> Tensor:
    """hidden [..,d] times ``weight`` in its dtype, [..,V]: of the whole vocabulary, on every rank. In backward each
    rank gets the whole gradient and uses the part of its own rows, so the loss counts once; the gradient of ``hidden``
    is this rank's part of a sum."""
    local, held = rows(weight, vocabulary)
    product = functional.linear(hidden, local.to(hidden.dtype))
    if held is None:
        return product
    whole: Tensor = _Whole.apply(product, held)
    return whole


class _Whole(torch.autograd.Function):
    """All ranks' columns of logits, side by side; in backward each rank gets the gradient of its own."""

    @staticmethod
    def forward(columns: Tensor, held: Rows) -> Tensor:
        filled = functional.pad(columns, (0, held.most - columns.shape[-1]))
        return held.stacked(filled).movedim(0, -2).flatten(-2)[..., : held.ids].contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Rows], output: Tensor) -> None:
        columns, ctx.held = inputs
        ctx.padding = columns.shape[-1] - ctx.held.held

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad[..., ctx.held.first : ctx.held.stop]
        return functional.pad(own, (0, ctx.padding)), None
