"""The product of a linear layer in float8, one operation for each of the two products that are: forward, and the
gradient of the input. The gradient of the weight is a product in the dtype of the input.

Within an operation are codes and scales: those who watch a block (the planner, recomputation, the compiler) see a
product, and nothing of it is saved but what any linear layer saves, the input and the weight as they were given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from shardwise.distributed.slices import local
from shardwise.models.layers import returned
from shardwise.techniques.float8.codes import CodedMatrix, coded
from shardwise.techniques.product import product_of, share_of
from shardwise.techniques.quantised import FLOAT8_BLOCK
from shardwise.techniques.tally import count, tally_of


def _coded(matrix: Tensor, scales: str, *, weight: bool, fused: bool = False) -> CodedMatrix:
    """The codes of a matrix [m,k] that is multiplied along k. In blocks, a scale of a weight is one of its transposed
    matrix too."""
    if scales == "row":
        return coded(matrix, 1, matrix.shape[1], fused=fused)
    return coded(matrix, FLOAT8_BLOCK if weight else 1, FLOAT8_BLOCK, fused=fused)


@torch.library.custom_op("shardwise::scaled_product", mutates_args=())
def scaled_product(x: Tensor, weight: Tensor, scales: str, fused: bool, tally: Tensor | None = None) -> Tensor:
    """x [n,in], weight [out,in] -> [n,out]. ``fused``: on a GPU codes are made in kernels that the compiler makes.
    ``tally``: where the layer's operands are counted (tally.py)."""
    if emulated(x):
        left = _values(x, scales, tally=tally)
        return left @ _values(weight, scales, weight=True, tally=tally, operand=1).t()
    codes = _coded(x, scales, weight=False, fused=fused)
    count(tally, 0, x, codes.codes)
    own = _coded(weight, scales, weight=True, fused=fused)
    count(tally, 1, weight, own.codes)
    return multiplied(codes, own, x.dtype)


@torch.library.custom_op("shardwise::scaled_gradient", mutates_args=())
def scaled_gradient(grad: Tensor, weight: Tensor, scales: str, fused: bool, tally: Tensor | None = None) -> Tensor:
    """grad [n,out], weight [out,in] -> [n,in]."""
    rows = scales == "row"
    if emulated(grad):
        values = _values(grad, scales, tally=tally, operand=2)
        own = _values(weight.t() if rows else weight, scales, weight=True)
        return values @ (own.t() if rows else own)
    own_codes = _coded(weight.t() if rows else weight, scales, weight=True, fused=fused)
    left = _coded(grad, scales, weight=False, fused=fused)
    count(tally, 2, grad, left.codes)
    return multiplied(left, own_codes if rows else own_codes.transposed(), grad.dtype)


@scaled_product.register_fake
def _(x: Tensor, weight: Tensor, scales: str, fused: bool, tally: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@scaled_gradient.register_fake
def _(grad: Tensor, weight: Tensor, scales: str, fused: bool, tally: Tensor | None = None) -> Tensor:
    return grad.new_empty(grad.shape[0], weight.shape[1])


def emulated(x: Tensor) -> bool:
    """Return whether what the codes stand for is multiplied, and not the codes: on a CPU, and in fp64, which no device
    multiplies in float8 for."""
    return x.device.type == "cpu" or x.dtype == torch.float64


def _values(
    matrix: Tensor, scales: str, *, weight: bool = False, tally: Tensor | None = None, operand: int = 0
) -> Tensor:
    found = _coded(matrix, scales, weight=weight)
    count(tally, operand, matrix, found.codes)
    return found.values(matrix.dtype)


def multiplied(a: CodedMatrix, b: CodedMatrix, dtype: torch.dtype) -> Tensor:
    """a [m,k] times the transpose of b [n,k]. The kernels want the contraction in consecutive memory."""
    codes = b.codes.contiguous().t()
    if a.columns == a.codes.shape[1]:
        scales, kinds = (a.scales, b.scales.t()), (ScalingType.RowWise, ScalingType.RowWise)
    else:
        # Scales of 1 x 128 lie column by column; those of 128 x 128 too, the blocks of k filled up to a multiple of 4.
        of_b = functional.pad(b.scales, (0, -b.scales.shape[1] % 4)).t()
        scales = a.scales.t().contiguous().t(), of_b
        kinds = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    plain = SwizzleType.NO_SWIZZLE
    return scaled_mm(a.codes, codes, scales[0], kinds[0], scales[1], kinds[1], plain, plain, output_dtype=dtype)


class _ScaledLinear(torch.autograd.Function):
    """Saves what a linear layer saves: the input where the weight is trained, and the weight where the input has a
    gradient. Codes, saved, would outlive a weight that is gathered."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, scales: str, fused: bool, tally: Tensor | None) -> Tensor:
        return returned(scaled_product(x, weight, scales, fused, tally))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, *ctx.how = inputs
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        grad_x = None if weight is None else scaled_gradient(grad, weight, *ctx.how)
        grad_weight = None if x is None else torch.mm(grad.t(), x)
        return grad_x, grad_weight, None, None, None


def linear(x: Tensor, weight: Tensor, scales: str, *, fused: bool = False, tally: Tensor | None = None) -> Tensor:
    """x [..,in], weight [out,in] -> [..,out], in the dtype of x."""
    out: Tensor = _ScaledLinear.apply(x.flatten(0, -2), weight, scales, fused, tally)
    return out.unflatten(0, x.shape[:-1])


def multiply_scaled(layer: nn.Linear, scales: str, *, fused: bool) -> None:
    """Have the layer multiply by what it holds of its weight, in float8."""

    def multiply(x: Tensor) -> Tensor:
        share = share_of(layer)
        weight = share.used(local(layer.weight).to(x.dtype))
        out = linear(x, weight, scales, fused=fused, tally=tally_of(layer))
        if layer.bias is None or share.group is not None:
            return out
        return out + share.used(local(layer.bias).to(x.dtype))

    product_of(layer).multiply = multiply
