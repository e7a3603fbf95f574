"""RMSNorm, gated activations, rotary embedding. Each saves for backward only what it must, the same tensors for every
data type and device, so that the bytes a planner reads off fake tensors are the bytes of a real step."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.traceback import annotate, get_current_meta

from shardwise.models.config import ModelSpec

aten = torch.ops.aten
Rotary = tuple[Tensor, Tensor]
Finish = Callable[[Tensor, Tensor], Any]
AGAIN = "shardwise: made again"
FUSED_NORM = ("cuda",)
"""Devices for which torch has RMSNorm and its gradient as one operator each (since 2.9)."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over ``dtype`` are kept: fp32, and fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rounded(value: float, dtype: torch.dtype) -> float:
    """The number of ``dtype`` that is nearest to ``value``."""
    step = math.ldexp(torch.finfo(dtype).eps, math.frexp(value)[1] - 1)
    return round(value / step) * step


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap), or x without a cap."""
    return x if cap is None else torch.tanh(x / cap) * cap


def returned(x: Tensor) -> Tensor:
    """x, as the forward of an autograd function is to return it where torch.compile traces: an object of its own, which
    an operation in place or a cast to the same dtype does not make. From any other torch 2.11 computes wrong gradients,
    and says nothing."""
    return x.view_as(x) if torch.compiler.is_compiling() else x


def made_again() -> AbstractContextManager[None]:
    """Have selective recomputation compute again, and not keep, what is computed within: for layers whose result is
    many times as wide as what they read. It holds for compiled code too."""
    return annotate({AGAIN: True})


def is_made_again() -> bool:
    """Return whether what is computed now stands within :func:`made_again`."""
    return AGAIN in get_current_meta().get("custom", ())


def _fused(x: Tensor) -> bool:
    """Return whether torch's own operator computes the norm, which reads and writes each element once. What is compiled
    is left in its parts, which the compiler joins with what stands around them."""
    return x.device.type in FUSED_NORM and not torch.compiler.is_compiling()


class _RMSNormFunction(torch.autograd.Function):
    """Saves x, the weight, and the reciprocal root mean square of each row. ``plus_one``: the weight is added to one,
    in fp32, or bf16 would lose a small one."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
        wide = accumulation_dtype(x.dtype)
        if _fused(x):
            given, scale = (x.to(wide), weight.to(wide) + 1) if plus_one else (x, weight)
            out, rstd = aten._fused_rms_norm(given, weight.shape, scale, eps)
            return out.to(x.dtype), rstd
        given = x.to(wide)
        rstd = torch.linalg.vector_norm(given, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        if plus_one:
            return returned(torch.mul(given, rstd).mul_(weight.to(wide) + 1).to(x.dtype)), rstd
        return returned(torch.mul(given, rstd).to(x.dtype).mul_(weight)), rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float, bool], output: tuple[Tensor, Tensor]) -> None:
        x, weight, _, ctx.plus_one = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # that of rstd would be zeros
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None, None, None]:
        if grad is None:
            return None, None, None, None
        x, weight, rstd = ctx.saved_tensors
        wide = rstd.dtype
        scale = weight.to(wide) + 1 if ctx.plus_one else weight
        if _fused(x):
            given = (grad.to(wide), x.to(wide)) if ctx.plus_one else (grad, x)
            wanted = list(ctx.needs_input_grad[:2])
            found = aten._fused_rms_norm_backward(*given, weight.shape, rstd, scale, wanted)
            grad_x, grad_weight = (g.to(x.dtype) if w else None for g, w in zip(found, wanted, strict=True))
            return grad_x, grad_weight, None, None
        normed, grad = x.to(wide) * rstd, grad.to(wide)
        wanted = ctx.needs_input_grad[1]
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype) if wanted else None
        grad = grad * scale  # of the weight's type: the product is as wide as the gradient
        mean = torch.linalg.vecdot(grad, normed).unsqueeze(-1).div_(x.shape[-1])
        return grad.addcmul_(normed, mean, value=-1.0).mul_(rstd).to(x.dtype), grad_weight, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """x / rms(x) * weight over the last dim of x [..,d], weight [d]; ``plus_one``: times 1 + weight."""
    return _RMSNormFunction.apply(x, weight.to(x.dtype), eps, plus_one)[0]


class RMSNorm(nn.Module):
    """x / rms(x) * weight (or 1 + weight) over the last dim; statistics in fp32 (fp64 for fp64), the weight cast to x's
    dtype."""

    def __init__(self, size: int, eps: float, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if plus_one else torch.ones(size))
        self.eps, self.plus_one = eps, plus_one

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.plus_one)


class _Gated(torch.autograd.Function):
    """An activation that saves gate and up; everything else is made again in backward."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)


class _SwiGLU(_Gated):
    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return returned(nn.functional.silu(gate).mul_(up))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, nn.functional.silu(gate).mul_(grad)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, element by element."""
    return _SwiGLU.apply(gate, up)


class _GeGLU(_Gated):
    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return returned(nn.functional.gelu(gate, approximate="tanh").mul_(up))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
        return grad_gate, nn.functional.gelu(gate, approximate="tanh").mul_(grad)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, with gelu's approximation by tanh."""
    return _GeGLU.apply(gate, up)


CLAMP, SLOPE = 7.0, 1.702
"""Of gpt-oss's gated activation: beyond what it cuts gate and up, and how steep its sigmoid is."""


class _ClampedSwiGLU(_Gated):
    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=CLAMP)
        return returned(torch.sigmoid(gate * SLOPE).mul_(gate).mul_(up.clamp(-CLAMP, CLAMP).add_(1)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        given_gate, given_up = ctx.saved_tensors
        gate = given_gate.clamp(max=CLAMP)
        share = torch.sigmoid(gate * SLOPE)
        grad_up = (share * gate).mul_(grad).mul_(given_up.abs() <= CLAMP)
        slope = (1 - share).mul_(gate).mul_(SLOPE).add_(1).mul_(share)
        grad_gate = slope.mul_(given_up.clamp(-CLAMP, CLAMP).add_(1)).mul_(grad).mul_(given_gate <= CLAMP)
        return grad_gate, grad_up


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate * sigmoid(1.702 gate) * (up + 1), of gate cut at 7 and up at -7 and 7."""
    return _ClampedSwiGLU.apply(gate, up)


GATES = {"silu": swiglu, "gelu_tanh": geglu, "clamped_swiglu": clamped_swiglu}
"""By ``ModelSpec.activation``."""


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float, interleaved: bool = False) -> Tensor:
    rotated = 2 * cos.shape[-1]
    if rotated < x.shape[-1]:
        return torch.cat([_rotate(x[..., :rotated], cos, sin, sign, interleaved), x[..., rotated:]], -1)
    pairs = x.unflatten(-1, (-1, 2)).transpose(-1, -2) if interleaved else x.unflatten(-1, (2, -1))
    out = pairs * cos.unsqueeze(-2)
    out[..., 0, :].addcmul_(pairs[..., 1, :], sin, value=-sign)
    out[..., 1, :].addcmul_(pairs[..., 0, :], sin, value=sign)
    out = out.transpose(-1, -2) if interleaved else out
    return out.flatten(-2).to(x.dtype)  # under autocast the tables are wider than what a projection made


class _Rotate(torch.autograd.Function):
    """Saves the tables alone: backward is the opposite rotation."""

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        return returned(_rotate(x, cos, sin, 1.0, interleaved))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
        ctx.interleaved = inputs[3]
        ctx.save_for_backward(*inputs[1:3])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1.0, ctx.interleaved), None, None, None


def rotate(x: Tensor, rotary: Rotary, *, interleaved: bool = False) -> Tensor:
    """x[b,s,h,e] rotated by the tables of :func:`rotary_tables`; element i is paired with i + r/2, where r elements are
    rotated and the rest is left; ``interleaved``: 2i with 2i + 1. The result has the dtype of x, whatever that of the
    tables."""
    return _Rotate.apply(x, *rotary, interleaved)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), or another activation; ``size`` wide in between."""

    def __init__(self, spec: ModelSpec, size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.hidden_size, size, bias=spec.mlp_bias)
        self.up = nn.Linear(spec.hidden_size, size, bias=spec.mlp_bias)
        self.down = nn.Linear(size, spec.hidden_size, bias=spec.mlp_bias)
        self.gated = GATES[spec.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gated(self.gate(x), self.up(x)))


class Part(nn.Module):
    """A decoder, or a part of one: some of its blocks (``layers``), and before and after them what it has of its ends.
    ``spec`` is of the whole model; ``kernel`` that of attention, as in MaskSpec; ``input_trained``: whether anything is
    trained in the parts before this one, which is what gives its input a gradient."""

    def __init__(self, spec: ModelSpec, input_trained: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.kernel = "auto"
        self.input_trained = input_trained


class Head(nn.Linear):
    """The output layer: hidden [..,d] -> logits [..,V]. What computes with its weight without its product runs inside
    its call, as ``finish``: FSDP2 holds the weight for as long as that lasts."""

    def __init__(self, size: int, vocabulary: int) -> None:
        super().__init__(size, vocabulary, bias=False)

    def forward(self, hidden: Tensor, finish: Finish | None = None) -> Tensor:
        """Return what ``finish`` makes of hidden and the weight [V,d] as it is, if there is one; else the product, in
        hidden's dtype."""
        if finish is not None:
            return finish(hidden, self.weight)
        if hidden.shape[-1] > self.in_features:  # of several tokens ahead
            hidden = hidden.unflatten(-1, (-1, self.in_features))
        return nn.functional.linear(hidden, self.weight.to(hidden.dtype))
