"""RMSNorm, SwiGLU and rotary embedding. Each saves for backward only what it must, the same tensors for every
data type and device, so that the bytes a planner reads off fake tensors are the bytes of a real step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.models.config import ModelSpec, RopeScaling

Rotary = tuple[Tensor, Tensor]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over ``dtype`` are kept in: fp32, and fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _RMSNorm(torch.autograd.Function):
    """Saves x, the weight, and the reciprocal root mean square of each row."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        wide = x.to(accumulation_dtype(x.dtype))
        rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        return torch.mul(wide, rstd).to(x.dtype).mul_(weight), rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        x, weight, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        wide = rstd.dtype
        normed = x.to(wide) * rstd
        grad = grad.to(wide)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad = grad * weight.to(wide)
        mean = torch.linalg.vecdot(grad, normed).unsqueeze(-1).div_(x.shape[-1])
        return grad.addcmul_(normed, mean, value=-1.0).mul_(rstd).to(x.dtype), grad_weight, None


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim; statistics in fp32 (fp64 for fp64), the weight cast to x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight.to(x.dtype), self.eps)[0]


class _SwiGLU(torch.autograd.Function):
    """Saves gate and up; silu(gate) is made again in backward."""

    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return nn.functional.silu(gate).mul_(up)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, nn.functional.silu(gate).mul_(grad)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, element by element."""
    return _SwiGLU.apply(gate, up)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    pairs = x.unflatten(-1, (2, -1))
    first, second = pairs.unbind(-2)
    out = pairs * cos.unsqueeze(-2)
    out[..., 0, :].addcmul_(second, sin, value=-sign)
    out[..., 1, :].addcmul_(first, sin, value=sign)
    return out.flatten(-2)


class _Rotate(torch.autograd.Function):
    """Saves the tables alone: backward is the opposite rotation."""

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _rotate(grad, *ctx.saved_tensors, -1.0), None, None


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """x[b,s,h,e] turned by the tables of :func:`rotary_tables`; element i is paired with i + e/2."""
    return _Rotate.apply(x, *rotary)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Positions divided by ``factor``: at every frequency (linear), or at low ones with a ramp between (Llama 3.1)."""
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    turns = frequencies * (scaling.original_max_position_embeddings / (2 * math.pi))
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(slow, frequencies, ramp.clamp(0.0, 1.0))


def rotary_tables(spec: ModelSpec, positions: Tensor, dtype: torch.dtype) -> Rotary:
    """cos and sin [b,s,1,e/2] for ``positions`` [b,s], computed in fp32 (fp64 for fp64) and cast to ``dtype``."""
    wide = accumulation_dtype(dtype)
    exponents = torch.arange(0, spec.head_dim, 2, device=positions.device).to(wide) / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    if spec.rope_scaling is not None:
        frequencies = _scaled(frequencies, spec.rope_scaling)
    angles = (positions.to(wide).unsqueeze(-1) * frequencies).unsqueeze(2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.up = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.down = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate(x), self.up(x)))
