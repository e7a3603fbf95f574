"""The embedding and the output layer where tensor-parallel ranks hold rows of the vocabulary each.

Their weight is a DTensor, cut along dim 0 over a mesh of one axis. Where the ranks do not divide the vocabulary the
last rank has fewer rows, or as many with padding at their end, which takes part in nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from shardwise.spec.layout import cut
from shardwise.techniques.crossing import Group, stacked


@dataclass(frozen=True)
class Rows:
    """The ids from ``first`` to before ``stop`` are this rank's; ``most``: rows of a rank, padding included; ``ids``:
    the size of the whole vocabulary."""

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
        """Rows of this rank that stand for an id."""
        return self.stop - self.first

    def own(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Of each id its row here, 0 if it is another rank's; and whether it is this rank's."""
        mine = (ids >= self.first) & (ids < self.stop)
        return (ids - self.first).masked_fill_(~mine, 0), mine

    def stacked(self, numbers: Tensor) -> Tensor:
        """The ranks' ``numbers``, of one shape on all, as [ranks,..]."""
        return stacked(numbers, self.group)


def rows(weight: Tensor, ids: int | None = None) -> tuple[Tensor, Rows | None]:
    """This rank's part of a weight [V,d], with its padding, and which rows it is; None for a weight that is whole here.
    ``ids``: the size of the vocabulary, where the weight has rows of padding."""
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
    """This rank's rows of ``weight`` for int64 ``ids``, [*ids.shape,d], zero where an id is another rank's: their sum
    over the ranks is the embedding."""
    local, held = rows(weight, vocabulary)
    if held is None:
        return functional.embedding(ids, local)
    own, mine = held.own(ids)
    return functional.embedding(own, local).masked_fill_(~mine.unsqueeze(-1), 0.0)


def logits(hidden: Tensor, weight: Tensor, vocabulary: int | None = None) -> Tensor:
    """hidden [..,d] times ``weight`` in its dtype, [..,V]: of the whole vocabulary, on every rank. Each rank propagates
    the whole gradient, of which its own rows' part goes on: so a loss of them counts once, and the gradient of hidden
    is this rank's part of a sum."""
    local, held = rows(weight, vocabulary)
    product = functional.linear(hidden, local.to(hidden.dtype))
    if held is None:
        return product
    whole: Tensor = _Whole.apply(product, held)
    return whole


class _Whole(torch.autograd.Function):
    """Columns of logits side by side; the gradient is each rank's own columns."""

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
