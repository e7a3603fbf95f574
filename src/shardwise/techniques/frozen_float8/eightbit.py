"""A matrix in float8, in plain torch: codes (e4m3), and of each block of rows and columns a scale in fp32 by which they
are multiplied. Blocks begin at the matrix's first row and column; those at its other edges may be smaller.

A scale that is chosen here is the least power of two with which the block's largest value can be told, as products in
float8 choose theirs: what codes stand for is then exact in bf16, fp32 and fp64, and coded again they stand for the
same. Those of a file are whatever they are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwise.models.float8 import WRITTEN, exponents, power_of_two
from shardwise.techniques import quantised
from shardwise.techniques.quantised import rows_at_once
from shardwise.techniques.share import MatrixPiece


class KeptCodes(NamedTuple):
    """Codes uint8 [rows, columns], and the bytes [blocks, 4] of the blocks' fp32 scales, row of blocks by row."""

    codes: Tensor
    scales: Tensor


def coded(matrix: Tensor, scales: Tensor | None = None) -> KeptCodes:
    """Return the codes of a matrix [out, in], which begins with a block's first row and column; with the ``scales``
    [blocks] of a file, those that were its codes there."""
    rows, columns = matrix.shape
    size, across = quantised.STORED_BLOCK, quantised.blocks(columns)
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=matrix.device)
    made = matrix.new_empty(quantised.blocks(rows), across, dtype=torch.float32)
    step = max(size, rows_at_once(rows, columns) // size * size)
    for start in range(0, rows, step):
        part = matrix[start : start + step].float()
        own = slice(start // size, start // size + quantised.blocks(len(part)))
        blocks = pad(part, (0, -columns % size, 0, -len(part) % size)).view(-1, size, across, size)
        if scales is None:
            made[own] = power_of_two(exponents(blocks.abs().amax(dim=(1, 3))))
        else:
            made[own] = scales[own]
        by = torch.where(made[own] == 0, 1.0, made[own])[:, None, :, None]  # of zeros alone
        found = (blocks / by).view(-1, across * size)[: len(part), :columns].to(WRITTEN)
        codes[start : start + step] = found.view(torch.uint8)
    return KeptCodes(codes, made.view(-1, 1).view(torch.uint8))


def coded_each(matrix: Tensor, first: int, each: int, scales: Tensor | None = None) -> KeptCodes:
    """Return the codes of rows of a stack of matrices, each of so many rows and coded by itself. ``matrix`` has those
    from row ``first`` on, where a block begins; ``scales`` are of all its blocks, one row of them after another."""
    found, before = list[KeptCodes](), 0
    for start, stop in _of_each(first, len(matrix), each):
        down = quantised.blocks(stop - start)
        own = None if scales is None else scales[before : before + down]
        found.append(coded(matrix[start:stop], own))
        before += down
    return KeptCodes(*map(torch.cat, zip(*found, strict=True)))


def _of_each(first: int, count: int, each: int) -> list[tuple[int, int]]:
    """Cut so many rows from row ``first`` of a stack on at the edges of its matrices."""
    edges = [0, *range(each - first % each, count, each), count]
    return list(pairwise(edges))


def dequantise(kept: KeptCodes, dtype: torch.dtype, piece: MatrixPiece | None = None, experts: int = 1) -> Tensor:
    """Return the matrix [out, in] that the codes stand for, computed in fp32 or wider; or a ``piece`` of it, of which
    ``kept`` has the codes, and the scales of the whole; or the matrices of so many ``experts``."""
    return restore(kept, dtype, piece, experts)


def _place(piece: MatrixPiece | None) -> list[int] | None:
    return None if piece is None else [piece.row, piece.column, piece.columns]


def dequantise_each(kept: KeptCodes, dtype: torch.dtype, first: int, each: int) -> Tensor:
    """Return what :func:`coded_each` was given, as codes have it."""
    across, before, made = quantised.blocks(kept.codes.shape[1]), 0, list[Tensor]()
    for start, stop in _of_each(first, len(kept.codes), each):
        count = quantised.blocks(stop - start) * across
        made.append(dequantise(KeptCodes(kept.codes[start:stop], kept.scales[before : before + count]), dtype))
        before += count
    return torch.cat(made)


def restore(
    kept: Sequence[Tensor], dtype: torch.dtype, piece: MatrixPiece | None, experts: int, again: bool = False
) -> Tensor:
    """As :func:`dequantise`, of codes and scales. ``again``: in backward, where it is an operation of its own."""
    codes, scales = kept
    made: Tensor = _from_float8(codes, scales, dtype, _place(piece), experts, again)
    return made


@torch.library.custom_op(
    "shardwise::from_float8",
    mutates_args=(),
    schema="(Tensor codes, Tensor scales, ScalarType dtype, int[]? piece, int experts, bool again) -> Tensor",
)
def _from_float8(codes: Tensor, scales: Tensor, dtype: torch.dtype, piece: Any, experts: int, again: bool) -> Tensor:
    """One operation, since its shape says what it takes meanwhile (quantised.py); on a CPU, where torch's product of
    two dtypes makes copies in fp32, some rows at a time."""
    (rows, columns), size = codes.shape, quantised.STORED_BLOCK
    row, column, whole = (0, 0, columns) if piece is None else piece
    grid = scales.contiguous().view(torch.float32).view(experts, -1, quantised.blocks(whole))
    above = (
        torch.arange(rows // experts, dtype=torch.int32, device=codes.device)
        .add_(row)
        .div_(size, rounding_mode="floor")
    )
    above = torch.cat([above + expert * grid.shape[1] for expert in range(experts)]) if experts > 1 else above
    across = slice(column // size, quantised.blocks(column + columns))
    used, head = grid.flatten(0, 1)[:, across], min(-column % size, columns)
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    step = rows if codes.is_cuda else rows_at_once(rows, columns)
    for start in range(0, rows, step):
        part = out[start : start + step]
        part.copy_(codes[start : start + step].view(WRITTEN))
        of_rows = used.index_select(0, above[start : start + step])
        if head:
            part[:, :head].mul_(of_rows[:, :1])
            of_rows = of_rows[:, 1:]
        many = (columns - head) // size
        part[:, head : head + many * size].unflatten(1, (many, size)).mul_(of_rows[:, :many].unsqueeze(-1))
        if head + many * size < columns:
            part[:, head + many * size :].mul_(of_rows[:, many:])
    return out


@_from_float8.register_fake
def _(codes: Tensor, scales: Tensor, dtype: torch.dtype, piece: Any, experts: int, again: bool) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)
