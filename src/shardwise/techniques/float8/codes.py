"""Matrices in float8 (e4m3) beside the scales that their codes are to be multiplied by.

Scales are powers of two, rounded up: a code is then a value rounded once, and what codes stand for is exact in
bf16, fp32 and fp64. So results depend neither on the dtype in which scales are kept nor on which kernel
multiplies, and a piece of a matrix that is cut between blocks has the codes that it has in the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from shardwise.models.float8 import LARGEST_EXPONENT, LARGEST_MANTISSA, SMALLEST_EXPONENT
from shardwise.techniques.quantised import FLOAT8_BLOCK
from shardwise.techniques.tally import OPERANDS, count, tally_of

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class CodedMatrix:
    """The codes [m,k] of a matrix, and its fp32 scales: one for ``rows`` x ``columns`` of it."""

    codes: Tensor
    scales: Tensor
    rows: int
    columns: int

    def transposed(self) -> CodedMatrix:
        """Return the transposed matrix, with the same scales."""
        return CodedMatrix(self.codes.t(), self.scales.t(), self.columns, self.rows)

    def part(self, first: int, last: int) -> CodedMatrix:
        """Return some of its rows, with scales in memory of their own, as kernels want it aligned."""
        scales = self.scales[first // self.rows : -(-last // self.rows)].clone()
        return CodedMatrix(self.codes[first:last], scales, self.rows, self.columns)

    def lengthened(self, rows: int) -> CodedMatrix:
        """Return it with so many rows of zeros below; each row of it has scales of its own."""
        codes = pad(self.codes.view(torch.uint8), (0, 0, 0, rows)).view(E4M3)
        return CodedMatrix(codes, pad(self.scales, (0, 0, 0, rows), value=1.0), self.rows, self.columns)

    def values(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Return what the codes stand for, [m,k]; in the memory of ``out`` where that is given."""
        found = self.codes.to(dtype) if out is None else out.copy_(self.codes)
        return _scaled(found, self.scales.to(dtype), self.rows, self.columns, out=found)


def coded(
    matrix: Tensor, rows: int, columns: int, *, fused: bool = False, exponents: Tensor | None = None
) -> CodedMatrix:
    """Return the codes of a matrix [m,k], of which each ``rows`` x ``columns`` elements share a scale: the smallest
    power of two with which the largest of them can be told, or that of the ``exponents``. ``fused``: in kernels that
    the compiler makes. Raises ValueError for a matrix that is no whole number of blocks: it would be a piece that was
    cut within one."""
    (m, k) = matrix.shape
    if m % rows or k % columns:
        raise ValueError(f"a matrix of {m} x {k} is not made of whole blocks of {rows} x {columns}")
    codes, scales = (_compiled() if fused else codes_and_scales)(matrix, rows, columns, exponents)
    return CodedMatrix(codes, scales, rows, columns)


@dataclass(frozen=True)
class WeightCodes:
    """The form in which the weight of a ``layer`` is gathered whose product is in float8: codes and scales of 128 x
    128. Multiplied, it is coded again, to codes that stand for the same: that is exact in the dtype that it is used in.
    ``fused``: on a GPU, in kernels that the compiler makes."""

    layer: nn.Module
    fused: bool = False

    def sent(self, shard: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return codes, as bytes, and scales of a rank's rows [n,k], rounded to the dtype in which they are used."""
        code = _compiled_codes() if self.fused and has_kernels(shard) else codes_of
        used = shard.to(dtype)  # in a kernel of its own: one that is fused would leave the rounding out
        codes, scales = code(used)
        count(tally_of(self.layer), OPERANDS.index("weight"), used, codes)
        return codes.view(torch.uint8), scales

    def values(self, gathered: Sequence[Tensor], dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Return what the codes and scales of all ranks stand for."""
        codes, scales = gathered
        out = torch.empty(codes.shape, dtype=dtype, device=codes.device) if out is None else out
        value = _compiled_values() if self.fused and has_kernels(codes) else values_of
        return value(codes.view(E4M3), scales, out)


def has_kernels(tensor: Tensor) -> bool:
    """Return whether a tensor is on a device for which kernels are worth compiling."""
    return tensor.is_cuda


def codes_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight's codes and scales."""
    return codes_and_scales(weight, FLOAT8_BLOCK, FLOAT8_BLOCK)


def values_of(codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """Write to ``out`` what a weight's codes and scales stand for, and return it."""
    return CodedMatrix(codes, scales, FLOAT8_BLOCK, FLOAT8_BLOCK).values(out.dtype, out)


@cache
def _compiled_codes() -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return one kernel for weights of all sizes: with one for each the compiler would soon give up."""
    return torch.compile(codes_of, dynamic=True)


@cache
def _compiled_values() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return torch.compile(values_of, dynamic=True)


@cache
def _compiled() -> Callable[[Tensor, int, int, Tensor | None], tuple[Tensor, Tensor]]:
    return torch.compile(codes_and_scales, fullgraph=True)


def codes_and_scales(matrix: Tensor, rows: int, columns: int, exponents: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The codes [m,k] and scales of blocks of a matrix."""
    exponents = exponents_of(matrix, rows, columns) if exponents is None else exponents
    inverse = _power(exponents.neg()).to(matrix.dtype)
    return _scaled(matrix, inverse, rows, columns).to(E4M3), _power(exponents)


def exponents_of(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """The exponents of the scales of blocks, int32 [m/rows,k/columns]: read off the bits of their largest elements,
    without a division, which would round. Where an element is not finite it is one that makes the scale so too, and
    greater than any other: of blocks that are parts of one the greatest is the whole's."""
    m, k = matrix.shape
    blocks = matrix.reshape(m // rows, rows, k // columns, columns)
    largest = torch.linalg.vector_norm(blocks, ord=torch.inf, dim=(1, 3))
    if largest.dtype == torch.float64:
        mantissas, exponents = torch.frexp(largest)
        wanted = exponents - LARGEST_EXPONENT + (mantissas > LARGEST_MANTISSA).int()
    else:
        bits = largest.float().view(torch.int32)
        wanted = (bits >> 23) - 126 - LARGEST_EXPONENT + ((bits & 0x7FFFFF) > 0x600000).int()
    wanted = wanted.clamp(min=SMALLEST_EXPONENT, max=-SMALLEST_EXPONENT)
    return torch.where(torch.isfinite(largest), wanted, _NOT_FINITE)


_NOT_FINITE = 1 << 10


def _power(exponents: Tensor) -> Tensor:
    """2 to these powers in fp32, written as bits, which is exact on every device; NaN for what is not finite: codes
    have no infinity, and would hide it."""
    powers = ((exponents + 127) << 23).view(torch.float32)
    return torch.where(exponents.abs() == _NOT_FINITE, torch.nan, powers)


def _scaled(matrix: Tensor, scales: Tensor, rows: int, columns: int, out: Tensor | None = None) -> Tensor:
    """The matrix [m,k], each block multiplied by its scale; in the memory of ``out`` where that is given."""
    m, k = matrix.shape
    size = (m // rows, rows, k // columns, columns)
    if out is not None and out.is_contiguous():
        out.view(size).mul_(scales[:, None, :, None])
        return out
    return (matrix.reshape(size) * scales[:, None, :, None]).view(m, k)
