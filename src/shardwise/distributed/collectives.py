"""The collectives of tensor parallelism, between the residual stream and the pairs of products (column, then row) that
are cut over the ranks. Of the stream the ranks hold either all tokens or their own.

:func:`enter` stands before the first of a pair of products, :func:`leave` behind the second. The backward of each sends
what the forward of the other does. Activations are plain tensors of local shape. Nothing is reduced in place: under
selective recompute the product's result is saved, and would be summed a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from shardwise.models.layers import returned
from shardwise.spec.layout import missing

Group = dist.ProcessGroup
all_gather = vars(dist).get("all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = vars(dist).get("reduce_scatter_single", dist.reduce_scatter_tensor)
"""The collectives' names since torch 2.13, or before it."""


def enter(stream: Tensor, group: Group, tokens: tuple[int, ...] | None = None) -> Tensor:
    """The residual stream as a column product reads it: all tokens, on every rank. In backward its gradients are
    summed.

    Without ``tokens`` every rank has the whole stream [..,d] already, and backward is an all-reduce. With them, as (b,
    s), each rank has its share [ceil(b*s/ranks),d] of the tokens, the last ones' filled up: an all-gather to [b,s,d],
    whose backward is a reduce-scatter.
    """
    entered: Tensor = _Enter.apply(stream, group, tokens)
    return entered


def enter_together(parts: Sequence[Tensor], group: Group, tokens: tuple[int, ...] | None = None) -> tuple[Tensor, ...]:
    """Several results of the residual stream, [..,n] of one dtype each, as column products read them: what
    :func:`enter` does, sent as one tensor, of which views come back."""
    return enter(torch.cat(list(parts), -1), group, tokens).split([part.shape[-1] for part in parts], -1)


def leave(partial: Tensor, group: Group, cut: bool = False) -> Tensor:
    """The sum over the ranks of a row product's results, [..,d]; its gradient reaches every rank's share.

    Whole on every rank, by an all-reduce; or, ``cut`` into the ranks' tokens, [ceil(n/ranks),d] by a reduce-scatter,
    whose backward is an all-gather; what is filled up is zero.
    """
    left: Tensor = _Leave.apply(partial, group, cut)
    return left


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(stream: Tensor, group: Group, tokens: tuple[int, ...] | None) -> Tensor:
        return stream.view_as(stream) if tokens is None else gathered(stream, group, tokens)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Group, tuple[int, ...] | None], output: Tensor) -> None:
        _, ctx.group, tokens = inputs
        ctx.cut = tokens is not None

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return scattered(grad, ctx.group) if ctx.cut else summed(grad, ctx.group), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(partial: Tensor, group: Group, cut: bool) -> Tensor:
        return returned(scattered(partial, group) if cut else summed(partial, group))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Group, bool], output: Tensor) -> None:
        partial, ctx.group, cut = inputs
        ctx.tokens = tuple(partial.shape[:-1]) if cut else None

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad if ctx.tokens is None else gathered(grad, ctx.group, ctx.tokens), None, None


def summed(partial: Tensor, group: Group) -> Tensor:
    """The sum of ``partial`` over the ranks, as a new tensor."""
    total = partial.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def gathered(share: Tensor, group: Group, tokens: tuple[int, ...]) -> Tensor:
    """The ranks' shares [n,d] of the tokens, one behind the other, as [*tokens,d]; what was filled up is cut off."""
    whole = stacked(share, group).flatten(0, 1)
    return whole[: torch.Size(tokens).numel()].view(*tokens, share.shape[1])


def stacked(part: Tensor, group: Group) -> Tensor:
    """The ranks' ``part``, of one shape on all, as [ranks,*part.shape]."""
    ranks = dist.get_world_size(group)
    flat = part.new_empty(ranks * part.numel())  # gloo takes no further dim for the ranks
    all_gather(flat, part.flatten(), group=group)
    return flat.view(ranks, *part.shape)


def scattered(partial: Tensor, group: Group) -> Tensor:
    """This rank's share [ceil(n/ranks),d] of the tokens of ``partial`` [..,d], summed over the ranks."""
    flat, ranks = partial.flatten(0, -2), dist.get_world_size(group)
    if more := missing(flat.shape[0], ranks):
        flat = pad(flat, (0, 0, 0, more))
    share = flat.new_empty(flat.shape[0] // ranks, flat.shape[1])
    reduce_scatter(share, flat.contiguous(), group=group)
    return share
