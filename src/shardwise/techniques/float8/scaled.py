"""The product of a linear layer in float8, one operation for each of the two products that are: forward, and the
gradient of the input. The gradient of the weight is a product in the dtype of the input. Of a matrix of experts each
multiplies rows of its own.

Within an operation are codes and scales: those who watch a block (the planner, recomputation, the compiler) see a
product, and nothing of it is saved but what any linear layer saves, the input and the weight as they were given. Where
ranks have parts of rows that share a scale, it is that of the whole rows: they tell each other the greatest exponents.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from shardwise.distributed.slices import local
from shardwise.distributed.torch_private import group_named
from shardwise.models.grouped import grouped
from shardwise.models.layers import returned
from shardwise.models.moe import Stacked, of_owners
from shardwise.techniques.float8.codes import CodedMatrix, coded, exponents_of
from shardwise.techniques.product import bias_of, product_of, share_of
from shardwise.techniques.quantised import FLOAT8_BLOCKS
from shardwise.techniques.stored_matrix import Made, StoredMatrix, as_kept, parts
from shardwise.techniques.tally import count, tally_of

ALIGNED_ROWS = 16
"""Of an expert's rows so many are multiplied at a time, as kernels want their scales aligned."""


class Scaling(NamedTuple):
    """The way in which a product is one of codes. ``scales``: for blocks, or a ``row`` each. ``fused``: on a GPU codes
    are made in kernels that the compiler makes. ``group``: the name of the process group whose ranks have the other
    parts of rows that are multiplied; empty where these are whole. ``back``: of those that give the gradient of the
    input. ``gathered``: the weight came as codes, and was counted where these were made."""

    scales: str
    fused: bool = False
    group: str = ""
    back: str = ""
    gathered: bool = False

    @property
    def words(self) -> str:
        """Return what operations are told of it: the scales, and ``fused`` and ``gathered`` where it is so."""
        return self.scales + " fused" * self.fused + " gathered" * self.gathered


def block_sizes(scales: str, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The rows and columns that share a scale, of an input and of a weight whose rows have this length."""
    size = FLOAT8_BLOCKS.get(scales, 0)
    return ((1, size), (size, size)) if size else ((1, length), (1, length))


class Operands(NamedTuple):
    """Makes codes of both matrices of a product, counted in ``tally``: an input and a weight, or, ``turned``, the
    gradient of what the layer returns and the weight, which is counted with the input alone."""

    tally: Tensor | None
    words: str
    group: str
    turned: bool

    def coded(self, x: Tensor, weight: Tensor) -> Iterator[CodedMatrix]:
        """Yield the codes of both, one after the other. In blocks, a scale of a weight is one of its transposed matrix
        too; of rows, the transposed matrix has its own."""
        scales, *more = self.words.split()
        of_x, of_weight = block_sizes(scales, x.shape[1])
        if self.turned:
            of_weight = of_weight[::-1]
        given = (x, of_x), (weight.flatten(0, -2), of_weight)
        greatest = _greatest([exponents_of(matrix, *each) for matrix, each in given], self.group) if self.group else ()
        for i, (matrix, block) in enumerate(given):
            own = greatest[i] if greatest else None
            found = coded(matrix, *block, fused="fused" in more and not emulated(x), exponents=own)
            if i == 0 or not (self.turned or "gathered" in more):
                count(self.tally, 2 if self.turned else i, matrix, found.codes)
            yield found


def product(x: Tensor, weight: Tensor, counts: Tensor | None, tally: Tensor | None, words: str, group: str) -> Tensor:
    """x [n,in], weight [out,in] -> [n,out]; with ``counts`` [E] x is sorted by expert, and weight [E,out,in].
    ``tally``: where the layer's operands are counted (tally.py)."""
    return _multiplied(x, weight, counts, Operands(tally, words, group, turned=False))


def gradient(
    grad: Tensor, weight: Tensor, counts: Tensor | None, tally: Tensor | None, words: str, group: str
) -> Tensor:
    """grad [n,out], weight [out,in], or of experts [E,out,in] -> [n,in]."""
    return _multiplied(grad, weight, counts, Operands(tally, words, group, turned=True))


def _made(x: Tensor, weight: Tensor, counts: Tensor | None, tally: Tensor | None, words: str, group: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[-2])


def _made_back(
    grad: Tensor, weight: Tensor, counts: Tensor | None, tally: Tensor | None, words: str, group: str
) -> Tensor:
    return grad.new_empty(grad.shape[0], weight.shape[-1])


PRODUCTS, GRADIENTS = (
    [torch.library.custom_op(f"shardwise::{name}{where}", call, mutates_args=()) for where in ("", "_over_ranks")]
    for name, call in (("scaled_product", product), ("scaled_gradient", gradient))
)
"""Operations of whole rows, and of rows of which ranks have parts: of these the planner counts what they send."""
for _product, _gradient in zip(PRODUCTS, GRADIENTS, strict=True):
    _product.register_fake(_made)
    _gradient.register_fake(_made_back)


def emulated(x: Tensor) -> bool:
    """Return whether what the codes stand for is multiplied, and not the codes: on a CPU, and in fp64, which no device
    multiplies in float8 for."""
    return x.device.type == "cpu" or x.dtype == torch.float64


def _multiplied(x: Tensor, weight: Tensor, counts: Tensor | None, operands: Operands) -> Tensor:
    """x [m,k] times the transpose of weight [n,k], or, where it is ``turned``, times weight [k,n]."""
    turned = operands.turned
    if emulated(x):
        codes = operands.coded(x, weight)
        left, right = next(codes).values(x.dtype), next(codes).values(x.dtype).view_as(weight)
        if counts is not None:
            return grouped(left, right.transpose(1, 2) if turned else right, counts)
        return left @ (right if turned else right.t())
    left_codes, right_codes = operands.coded(x, weight)
    if counts is None:
        return multiplied(left_codes, right_codes.transposed() if turned else right_codes, x.dtype)
    left_codes = left_codes.lengthened(ALIGNED_ROWS - 1)
    out, rows = x.new_empty(x.shape[0], weight.shape[2 if turned else 1]), weight.shape[1]
    for expert, (start, stop) in enumerate(pairwise([0, *counts.cumsum(0).tolist()])):
        if start < stop:
            own = right_codes.part(expert * rows, (expert + 1) * rows)
            many = left_codes.part(start, stop + (start - stop) % ALIGNED_ROWS)  # with some of the next expert's
            out[start:stop] = multiplied(many, own.transposed() if turned else own, x.dtype)[: stop - start]
    return out


def _greatest(exponents: list[Tensor], group: str) -> list[Tensor]:
    """The greatest of each over the ranks of a group, of all in one message."""
    together = torch.cat([each.flatten() for each in exponents])
    dist.all_reduce(together, dist.ReduceOp.MAX, group=group_named(group))
    sizes = [each.numel() for each in exponents]
    return [own.view_as(each) for own, each in zip(together.split(sizes), exponents, strict=True)]


def multiplied(a: CodedMatrix, b: CodedMatrix, dtype: torch.dtype) -> Tensor:
    """a [m,k] times the transpose of b [n,k]. The kernels want the contraction in consecutive memory."""
    codes, order = b.codes.contiguous().t(), SwizzleType.NO_SWIZZLE
    if b.rows == 1:  # and not a block of 128 x 128, which may be as long as a row
        scales, kinds = (a.scales, b.scales.t().contiguous()), (ScalingType.RowWise, ScalingType.RowWise)
    elif b.rows == FLOAT8_BLOCKS["mx"]:
        scales, kinds = (_in_tiles(a.scales), _in_tiles(b.scales.repeat_interleave(b.rows, 0))), (_MX, _MX)
        order = SwizzleType.SWIZZLE_32_4_4
    else:
        # Scales of 1 x 128 lie column by column; those of 128 x 128 too, the blocks of k filled up to a multiple of 4.
        of_b = functional.pad(b.scales, (0, -b.scales.shape[1] % 4)).t()
        scales = _by_columns(a.scales), _by_columns(of_b)
        kinds = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return scaled_mm(a.codes, codes, scales[0], kinds[0], scales[1], kinds[1], order, order, output_dtype=dtype)


_MX = ScalingType.BlockWise1x32


def _in_tiles(scales: Tensor) -> Tensor:
    """Scales [m,n] as their exponents, bytes in the order in which kernels of MX read them: in tiles of 128 x 4, of
    which row i + 32 j stands before row i + 32 (j + 1), and these before row i + 1. What fills up the last ones is of
    no effect."""
    m, n = scales.shape
    filled = functional.pad(scales, (0, -n % 4, 0, -m % 128), value=1.0)
    exponents = (filled.view(torch.int32) >> 23).to(torch.uint8)
    tiles = exponents.view(-(-m // 128), 4, 32, -(-n // 4), 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e8m0fnu)


def _by_columns(matrix: Tensor) -> Tensor:
    """The matrix [m,n] with strides (1, m), of a single row or column too."""
    return matrix.new_empty(matrix.shape[::-1]).t().copy_(matrix)


class _ScaledLinear(torch.autograd.Function):
    """Saves what a linear layer saves: the input where the weight is trained, and the weight where the input has a
    gradient. Codes, saved, would outlive a weight that is gathered."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, counts: Tensor | None, tally: Tensor | None, how: Scaling) -> Tensor:
        multiply = PRODUCTS[bool(how.group)]
        return returned(multiply(x, weight, counts, tally, how.words, how.group))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, counts, ctx.tally, ctx.how = inputs
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (x, weight, counts), how = ctx.saved_tensors, ctx.how
        grad_x, grad_weight = None, None
        if weight is not None:
            multiply = GRADIENTS[bool(how.back)]
            grad_x = multiply(grad, weight, counts, ctx.tally, how.words, how.back)
        if x is not None and counts is None:
            grad_weight = torch.mm(grad.t(), x)
        elif x is not None:
            grad_weight = torch.ops.shardwise.grouped_outer(grad.contiguous(), x, counts)
        return grad_x, grad_weight, None, None, None


Given = tuple[Tensor | None, Tensor | None, Scaling]
"""The rows that experts have, where operands are counted, and how it is multiplied."""


class _ScaledStored(torch.autograd.Function):
    """Multiplies likewise by a frozen weight that is stored as bytes: saves these, and makes the weight again."""

    @staticmethod
    def forward(x: Tensor, more: Given, made: Made, codes: Tensor, scales: Tensor, groups: Tensor | None) -> Tensor:
        counts, tally, how = more
        multiply = PRODUCTS[bool(how.group)]
        weight = made(as_kept(codes, scales, groups), x.dtype, False)
        return returned(multiply(x, weight, counts, tally, how.words, how.group))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, (counts, ctx.tally, ctx.how), ctx.made, codes, scales, groups = inputs
        ctx.save_for_backward(counts, codes, scales, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (counts, codes, scales, groups), how = ctx.saved_tensors, ctx.how
        multiply = GRADIENTS[bool(how.back)]
        weight = ctx.made(as_kept(codes, scales, groups), grad.dtype, True)
        grad_x = multiply(grad, weight, counts, ctx.tally, how.words, how.back)
        return grad_x, None, None, None, None, None


def linear(
    x: Tensor,
    weight: Tensor | StoredMatrix,
    how: Scaling,
    counts: Tensor | None = None,
    tally: Tensor | None = None,
) -> Tensor:
    """x [..,in], weight [out,in] -> [..,out], in the dtype of x. With ``counts`` [E] rows of x are sorted by expert, of
    which each has so many, and weight is [E,out,in]. ``tally``: where operands are counted."""
    rows = x.flatten(0, -2)
    out: Tensor
    if isinstance(weight, StoredMatrix):
        out = _ScaledStored.apply(rows, (counts, tally, how), weight.made, *parts(weight.used()))
    else:
        out = _ScaledLinear.apply(rows, weight, counts, tally, how)
    return out.unflatten(0, x.shape[:-1])


def multiply_scaled(layer: nn.Linear | Stacked, how: Scaling) -> None:
    """Have the layer multiply by what it holds of its weight, in float8."""

    def multiply(x: Tensor, counts: Tensor | None = None) -> Tensor:
        weight: Tensor | StoredMatrix | None = vars(layer).get("stored")
        if weight is None:
            weight = share_of(layer).used(local(layer.weight).to(x.dtype))
            weight = weight.unflatten(0, (-1, layer.rows)) if isinstance(layer, Stacked) else weight
        if isinstance(layer, Stacked):
            assert counts is not None
            out = linear(x, weight, how, counts, tally_of(layer))
            return out if layer.bias is None else out + of_owners(local(layer.bias), counts, out)
        out, bias = linear(x, weight, how, tally=tally_of(layer)), bias_of(layer, x.dtype)
        return out if bias is None else out + bias

    product_of(layer).multiply = multiply
