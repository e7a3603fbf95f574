"""A matrix in 4 bits: NF4 with double quantisation, in plain torch.

Every 64 elements of a row share a scale, their largest absolute value; each element is then the nearest of 16 values,
the quantiles of a normal distribution (Dettmers et al., QLoRA, arXiv 2305.14314). The scales, less their mean, are
quantised again, to an 8-bit dynamic type (Dettmers, arXiv 1511.04561), in groups of 256 that share an fp32 scale. Bits
and values equal those of bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.distributed.torch_private import outside_modes
from shardwise.techniques.device_tables import constant
from shardwise.techniques.quantised import NF4_BLOCK, NF4_GROUP, rows_at_once
from shardwise.techniques.share import MatrixPiece

# fmt: off
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on


Kept = tuple[Tensor, Tensor, Tensor]
"""Codes, scales and groups of a matrix."""


def quantise(weight: Tensor) -> Kept:
    """weight [out, in] -> codes [out, in / 2], two per byte, the first in the high bits; the scales of blocks [out, in
    / 64]; and the bytes [groups + 1, 4] of the groups' fp32 scales, followed by the mean. All are uint8."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(rows, columns // NF4_BLOCK, device=weight.device)
    values = constant(weight, "nf4", NF4)
    step = rows_at_once(rows, columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        blocks = weight[part].float().view(-1, columns // NF4_BLOCK, NF4_BLOCK)
        absmax[part] = blocks.abs().amax(-1)
        nearest = _nearest(blocks, absmax[part], values).view(-1, columns // 2, 2)
        codes[part] = nearest[..., 0] << 4 | nearest[..., 1]
    mean = absmax.view(-1).mean()
    rest = functional.pad((absmax - mean).view(-1), (0, -absmax.numel() % NF4_GROUP)).view(-1, NF4_GROUP)
    group_absmax = rest.abs().amax(-1)
    kept = _nearest(rest, group_absmax, constant(weight, "dynamic", DYNAMIC)).view(-1)[: absmax.numel()]
    return codes, kept.view_as(absmax), torch.cat([group_absmax, mean.view(1)]).view(-1, 1).view(torch.uint8)


def quantise_each(weight: Tensor, experts: int) -> Kept:
    """Quantise as :func:`quantise` does the matrix of each of so many experts, whose rows follow each other in
    ``weight``, as they do in what is returned."""
    codes, absmax, groups = zip(*map(quantise, weight.chunk(experts)), strict=True)
    return torch.cat(codes), torch.cat(absmax), torch.cat(groups)


def _nearest(blocks: Tensor, absmax: Tensor, values: Tensor) -> Tensor:
    """Return for each element of ``blocks`` [.., k], divided by its scale, the index of the nearest of the ``values``
    [n]."""
    unit = (blocks * (1.0 / absmax.clamp_min(1e-38)).unsqueeze(-1)).clamp_(-1, 1)
    return torch.bucketize(unit, (values[:-1] + values[1:]) / 2, out_int32=True).to(torch.uint8)


def dequantise(
    codes: Tensor, absmax: Tensor, group_absmax: Tensor, dtype: torch.dtype, piece: MatrixPiece | None = None
) -> Tensor:
    """Return the matrix [out, in] from the result of :func:`quantise`, computed in fp32, some rows at a time; or a
    ``piece`` of the matrix, with the groups of the whole one."""
    place = None if piece is None else (piece.row, piece.column // NF4_BLOCK, piece.columns // NF4_BLOCK)
    made: Tensor = _dequantise(codes, absmax, group_absmax, dtype, place, 1)
    return made


def dequantise_each(kept: Kept, experts: int, dtype: torch.dtype) -> Tensor:
    """Return the matrices [E*out, in] from the result of :func:`quantise_each`."""
    made: Tensor = _dequantise(*kept, dtype, None, experts)
    return made


@torch.library.custom_op(
    "shardwise::dequantise",
    mutates_args=(),
    schema="(Tensor codes, Tensor absmax, Tensor group_absmax, ScalarType dtype, int[]? piece, int experts) -> Tensor",
)
def _dequantise(
    codes: Tensor, absmax: Tensor, group_absmax: Tensor, dtype: torch.dtype, piece: Any, experts: int
) -> Tensor:
    """One operation, since its shape says in how many rounds it runs; quantised.py says what it takes meanwhile."""
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    of_group = group_absmax.contiguous().view(torch.float32).view(experts, -1)
    wide = functional.embedding(absmax.int(), constant(codes, "dynamic", DYNAMIC)[:, None]).view(experts, -1)
    wide.mul_(
        of_group[:, :-1].repeat_interleave(NF4_GROUP, 1)[:, : wide.shape[1]]
        if piece is None
        else _of(absmax, of_group.view(-1), *piece)
    )
    wide = wide.add_(of_group[:, -1:]).view(rows, -1, 1)
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    step = rows_at_once(rows, columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        values = functional.embedding(codes[part].int(), constant(codes, "nf4 pairs", PAIRS))
        out[part] = values.view(-1, columns // NF4_BLOCK, NF4_BLOCK).mul_(wide[part]).view(-1, columns)
        del values
    return out


@_dequantise.register_fake
def _(codes: Tensor, absmax: Tensor, group_absmax: Tensor, dtype: torch.dtype, piece: Any, experts: int) -> Tensor:
    return codes.new_empty(codes.shape[0], 2 * codes.shape[1], dtype=dtype)


def _of(absmax: Tensor, of_group: Tensor, row: int, block: int, row_blocks: int) -> Tensor:
    """Return for each block of a piece the scale of its group. The piece begins at this row and block of a matrix that
    has so many blocks in a row."""
    rows, blocks = (torch.arange(count, device=absmax.device) for count in absmax.shape)
    place = (rows + row).unsqueeze(1) * row_blocks + (blocks + block)
    return of_group[(place // NF4_GROUP).view(-1)]


def restore(
    kept: Sequence[Tensor], dtype: torch.dtype, piece: MatrixPiece | None, experts: int, again: bool = False
) -> Tensor:
    """Return the matrix that :func:`quantise` was given, or a ``piece`` of it; or those of so many ``experts``."""
    codes, absmax, group_absmax = kept
    if experts > 1:
        return dequantise_each((codes, absmax, group_absmax), experts, dtype)
    return dequantise(codes, absmax, group_absmax, dtype, piece)


def _dynamic() -> tuple[float, ...]:
    """Return 256 values from -1 to 1: 0 and 1, and in decade d of seven 2^d evenly spaced values on each side."""
    values = [0.0, 1.0]
    for decade in range(7):
        with outside_modes():
            edges = torch.linspace(0.1, 1.0, 2**decade + 1, dtype=torch.float32)
            middles = 10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)
            values += [*middles.tolist(), *(-middles).tolist()]
    return tuple(sorted(values))


DYNAMIC = _dynamic()
"""Computed at import: at first use, a fake tensor mode may be active, and the values would be lost."""

PAIRS = [(a, b) for a in NF4 for b in NF4]
"""Both values of each byte of codes."""
