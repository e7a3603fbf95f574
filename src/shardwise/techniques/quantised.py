"""The facts that moments.py, fourbit.py and plans share: what is stored in 8 and in 4 bits, and how many bytes it
takes."""

from __future__ import annotations

from math import ceil, prod

BLOCK = 256
"""Columns that share a scale."""
LEAST = 4096
"""Elements of the smallest matrix whose moments are stored in 8 bits; all smaller ones together take little."""
NF4_BLOCK, NF4_GROUP = 64, 256
"""How many elements of a row share a scale, and how many of these scales share one."""
NF4_PARTS = ("codes", "sizes", "groups")
"""What replaces a weight that is stored in 4 bits."""
FLOAT8_BLOCK = 128
"""Elements of a row that share a scale in float8; of a weight so many rows too."""
NF4_WIDE = 2**22
"""How many elements at a time are dequantised."""


def quantised(shape: tuple[int, ...]) -> bool:
    """Return whether the moments of a parameter of this (global) shape are stored in 8 bits."""
    return len(shape) == 2 and prod(shape) >= LEAST


def moment_bytes(shape: tuple[int, ...], local_numel: int) -> int:
    """Bytes of both moments in 8 bits, for ``local_numel`` elements (whole rows) of a parameter."""
    rows = local_numel // shape[1]
    return 2 * (local_numel + 4 * rows * ceil(shape[1] / BLOCK))


def nf4_shapes(rows: int, columns: int, experts: int = 1) -> dict[str, tuple[int, int]]:
    """The uint8 parameters that replace a weight [rows, columns] in 4 bits: names and shapes. Of a matrix of so many
    experts each has groups of its own."""
    groups = experts * (ceil(rows // experts * columns // NF4_BLOCK / NF4_GROUP) + 1)
    return dict(zip(NF4_PARTS, ((rows, columns // 2), (rows, columns // NF4_BLOCK), (groups, 4)), strict=True))


def nf4_rows_at_once(rows: int, columns: int) -> int:
    """Return how many rows are dequantised at a time."""
    return min(rows, max(1, NF4_WIDE // columns))


def dequantise_bytes(rows: int, columns: int) -> int:
    """The most that fourbit.py's operation holds besides what it is given and returns: the scales of all blocks; and of
    a round the codes as int32 (two to each), the values, and torch's table of pairs, or before them, of matrices of
    many experts, the groups' scales for all blocks."""
    scales = 4 * (rows * columns // NF4_BLOCK)
    return scales + max(scales, (4 + 2) * nf4_rows_at_once(rows, columns) * columns + 4 * 2 * 256)


def row_norms_bytes(rows: int, columns: int, rank: int) -> int:
    """Return the most that dora.py's operation holds besides what it is given and returns: the product of a round, and
    where A and B are converted to fp32 (``rank`` is else 0), A and the round's rows of B."""
    at_once = nf4_rows_at_once(rows, columns)
    return 4 * (at_once * columns + rank * (columns + at_once))
