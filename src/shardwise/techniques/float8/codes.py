"""Matrices in float8 (e4m3) beside the scales that their codes are to be multiplied by.

Scales are powers of two, rounded up: a code is then a value rounded once, and what codes stand for is exact in every
dtype that a model is computed in. So results depend neither on the dtype in which scales are kept nor on which kernel
multiplies, and a piece of a matrix that is cut between blocks has the codes that it has in the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST_MANTISSA, LARGEST_EXPONENT = 0.875, 9
"""The largest number of e4m3 is 448, 0.875 times 2^9."""
SMALLEST_SCALE = -126
"""The exponent of the smallest scale: below it the inverse of a scale is no number of 32 or 16 bits."""


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

    def values(self, dtype: torch.dtype) -> Tensor:
        """What the codes stand for, [m,k]."""
        found = self.codes.to(dtype)
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
    return torch.where(torch.isfinite(largest), wanted.clamp(min=SMALLEST_SCALE, max=-SMALLEST_SCALE), _NOT_FINITE)


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
