"""Dropout under tensor parallelism: on tensors that every rank holds whole, and on tensors of which each holds a part.

All ranks of a tensor-parallel group have the same state of torch's generators. For a tensor that is the same on all
ranks they therefore draw the same mask, as they must. For different columns or tokens the masks must differ: there all
ranks draw the same number, and the mask follows from it and the rank's place. Recomputation, which restores torch's
generators, makes the same masks again in both cases. So it is for rows that come to experts, of which a rank may get
any number: one number is drawn whatever comes, and what other layers drop is the same with expert parallelism or
without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PLACES = 2**20
"""Larger than the number of ranks in any group."""


def dropped(x: Tensor, share: float, place: int | None = None) -> Tensor:
    """Return ``x`` with a ``share`` of its elements zeroed, the others scaled up. ``place``: the rank's number, where
    ranks hold different parts of one tensor; None where all hold the same."""
    if place is None:
        out: Tensor = torch.native_dropout(x, share, True)[0]
        return out
    drawn = torch.randint(2**42, ())  # on the host: the operation reads it without waiting for a device
    out = drop(x, drawn, share, place)[0]
    return out


@torch.library.custom_op("shardwise::dropout", mutates_args=())
def drop(x: Tensor, drawn: Tensor, share: float, place: int) -> tuple[Tensor, Tensor]:
    """Return, like aten's native_dropout, the result and the mask of elements that are not zeroed. ``drawn`` is an
    int64 number on the host."""
    generator = torch.Generator(x.device).manual_seed(int(drawn) * _PLACES + place)
    kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - share, generator=generator)
    return (x * kept).mul_(1 / (1 - share)), kept


@drop.register_fake
def _(x: Tensor, drawn: Tensor, share: float, place: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float, int], output: tuple[Tensor, Tensor]) -> None:
    ctx.scale = 1 / (1 - inputs[2])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, None, None, None]:
    if grad is None:
        return None, None, None, None
    return torch.ops.aten.native_dropout_backward(grad, *ctx.saved_tensors, ctx.scale), None, None, None


drop.register_autograd(_backward, setup_context=_save)
