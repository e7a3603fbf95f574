"""Products of rows that are sorted by group with the matrix of each group: those of experts.

torch's ``grouped_mm`` computes them in one call where it serves; where it does not (fp64, sizes that are not whole 16
bytes), one product after another.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

ALIGNMENT_BYTES = 16
"""Of every row that torch's ``grouped_mm`` reads."""
SERVED = {"cpu": (torch.bfloat16, torch.float16, torch.float32), "cuda": (torch.bfloat16,)}
"""Dtypes for which it is one kernel, by device; on a CPU it is a loop of its own."""


def owners(counts: Tensor, rows: int) -> Tensor:
    """The group of each of so many rows, int64 [rows], where ``counts`` [E] says how many are each group's."""
    return torch.repeat_interleave(counts, output_size=rows)


def sorting(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The order that sorts rows by their group [R], in which rows of one stay as they were, and its inverse."""
    order = groups.argsort(stable=True)
    return order, torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


def served(x: Tensor, columns: int) -> bool:
    """Return whether one call computes x [R,k] times matrices of so many columns."""
    whole = all(size * x.element_size() % ALIGNMENT_BYTES == 0 for size in (x.shape[-1], columns))
    return whole and x.dtype in SERVED.get(x.device.type, ()) and x.shape[0] > 0


def _spans(counts: Tensor) -> list[tuple[int, int]]:
    ends = [0, *counts.cumsum(0).tolist()]
    return [*pairwise(ends)]


@torch.library.custom_op("shardwise::grouped", mutates_args=())
def _grouped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [R,k], weight [E,k,n] -> [R,n]: the rows of each group times its matrix."""
    if served(x, weight.shape[-1]):
        return grouped_mm(x, weight, offs=counts.cumsum(0).to(torch.int32))
    out = x.new_zeros(x.shape[0], weight.shape[-1])
    for group, (start, stop) in enumerate(_spans(counts)):
        torch.mm(x[start:stop], weight[group], out=out[start:stop])
    return out


@_grouped.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[-1])


@torch.library.custom_op("shardwise::grouped_outer", mutates_args=())
def _grouped_outer(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    """a [R,n], b [R,k] -> [E,n,k]: of each group a^T b over its rows, zeros where it has none."""
    if served(a, b.shape[-1]):
        return grouped_mm(a.t(), b, offs=counts.cumsum(0).to(torch.int32))
    out = a.new_zeros(counts.shape[0], a.shape[-1], b.shape[-1])
    for group, (start, stop) in enumerate(_spans(counts)):
        torch.mm(a[start:stop].t(), b[start:stop], out=out[group])
    return out


@_grouped_outer.register_fake
def _(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    return a.new_empty(counts.shape[0], a.shape[-1], b.shape[-1])


class _Grouped(torch.autograd.Function):
    """Saves the counts, the weight, and x only where the weight is trained."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        return _grouped(x, weight.transpose(1, 2), counts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        x, weight, counts = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, counts = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = _grouped(grad, weight, counts) if ctx.needs_input_grad[0] else None
        grad_weight = _grouped_outer(grad, x, counts) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def grouped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [R,k], whose rows are sorted by group, weight [E,n,k], ``counts`` [E] rows for each -> [R,n]."""
    return _Grouped.apply(x, weight, counts)
