"""The exchange of tokens for heads and back: each of the ranks has some tokens of all heads, or all tokens of some
heads (Jacobs et al., "DeepSpeed Ulysses", 2023). One operation, ``shardwise::exchange``, whose backward is the other
way."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.distributed.torch_private import group_named
from shardwise.techniques.cp.parts import copies

HEADS, TOKENS = 1, 2
"""Dims of [b,h,s,e]."""


def heads_for_tokens(x: Tensor, group: str, ranks: int) -> Tensor:
    """[b,h,s,e] of some tokens -> [b,h/ranks,ranks*s,e] of some heads. Of fewer heads than ranks each goes to
    several."""
    times = copies(x.shape[HEADS], ranks)
    repeated = x.repeat_interleave(times, HEADS) if times > 1 else x
    swapped: Tensor = exchange(repeated, group, ranks, HEADS, TOKENS)
    return swapped


def tokens_for_heads(x: Tensor, group: str, ranks: int) -> Tensor:
    """Undo :func:`heads_for_tokens`, where no head goes to several."""
    swapped: Tensor = exchange(x, group, ranks, TOKENS, HEADS)
    return swapped


def swapped(x: Tensor, group: str, ranks: int, split: int, join: int) -> Tensor:
    """Compute what :func:`exchange` returns, operation by operation: buffers are made and filled whatever the sizes, so
    that it does the same for one head, or one row, as for many."""
    split, join = _INSIDE[split], _INSIDE[join]
    given = x.transpose(HEADS, TOKENS).unflatten(split, (ranks, -1)).movedim(split, 0)
    parts, out = x.new_empty(given.shape), x.new_empty(given.shape)
    parts.copy_(given)
    dist.all_to_all_single(out, parts, group=group_named(group))
    del parts
    joined = x.new_empty(out.movedim(0, join).shape)
    joined.copy_(out.movedim(0, join))
    return joined.flatten(join, join + 1).transpose(HEADS, TOKENS)


_INSIDE = {HEADS: TOKENS, TOKENS: HEADS}
"""Where a dim is in [b,s,h,e], as tensors are laid out."""
exchange = torch.library.custom_op(
    "shardwise::exchange",
    swapped,
    mutates_args=(),
    schema="(Tensor x, str group, int ranks, int split, int join) -> Tensor",
)


@exchange.register_fake
def _(x: Tensor, group: str, ranks: int, split: int, join: int) -> Tensor:
    shape = list(x.shape)
    shape[split], shape[join] = shape[split] // ranks, shape[join] * ranks
    b, h, s, e = shape
    return x.new_empty(b, s, h, e).transpose(HEADS, TOKENS)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group, ctx.ranks, ctx.split, ctx.join = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    return exchange(grad, ctx.group, ctx.ranks, ctx.join, ctx.split), None, None, None, None


exchange.register_autograd(_backward, setup_context=_save)
