"""RMSNorm of rows whose columns are split over tensor-parallel ranks. The ranks add up each row's sum of squares: one
number per token in forward, and one in backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.distributed.collectives import Group
from shardwise.models.layers import accumulation_dtype, returned


def cut_norm(x: Tensor, weight: Tensor, eps: float, group: Group) -> Tensor:
    """x / rms(row) * weight for this rank's columns x [..,n] and weight [n], as many on every rank of ``group``;
    statistics in fp32 (fp64 for fp64)."""
    return _CutNorm.apply(x, weight.to(x.dtype), eps, group)[0]


class _CutNorm(torch.autograd.Function):
    """Saves what models/layers.py's RMSNorm does: x, the weight, and the reciprocal root mean square of each row."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float, group: Group) -> tuple[Tensor, Tensor]:
        given = x.to(accumulation_dtype(x.dtype))
        rstd = torch.linalg.vector_norm(given, dim=-1, keepdim=True).square_()
        dist.all_reduce(rstd, group=group)
        rstd.div_(x.shape[-1] * dist.get_world_size(group)).add_(eps).rsqrt_()
        return returned(torch.mul(given, rstd).to(x.dtype).mul_(weight)), rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float, Group], output: tuple[Tensor, Tensor]) -> None:
        x, weight, _, ctx.group = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None, None, None]:
        if grad is None:
            return None, None, None, None
        x, weight, rstd = ctx.saved_tensors
        normed = x.to(rstd.dtype) * rstd
        grad, grad_weight = grad.to(rstd.dtype), None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad = grad * weight
        mean = torch.linalg.vecdot(grad, normed).unsqueeze(-1)
        dist.all_reduce(mean, group=ctx.group)
        mean.div_(x.shape[-1] * dist.get_world_size(ctx.group))
        return grad.addcmul_(normed, mean, value=-1.0).mul_(rstd).to(x.dtype), grad_weight, None, None
