"""What is kept in 8 and in 4 bits, and in how many bytes: what moments.py and fourbit.py do, on paper."""

from __future__ import annotations

from math import ceil, prod

BLOCK = 256
"""Columns that share a scale."""
LEAST = 4096
"""Elements of the smallest matrix whose moments are kept in 8 bits; all smaller ones together weigh little."""
NF4_BLOCK, NF4_GROUP = 64, 256
"""Elements of a row of weights that share a size, and sizes that share one."""
NF4_PARTS = ("codes", "sizes", "groups")
"""What replaces a weight that is stored in 4 bits."""
NF4_WIDE = 2**22
"""Elements that are wide at one time while a matrix is made of its 4 bits."""


def quantised(shape: tuple[int, ...]) -> bool:
    """Whether a parameter of this (global) shape keeps its moments in 8 bits."""
    return len(shape) == 2 and prod(shape) >= LEAST


def moment_bytes(shape: tuple[int, ...], local_numel: int) -> int:
    """Bytes of both moments of ``local_numel`` elements (whole rows) of a parameter that keeps them in 8 bits."""
    rows = local_numel // shape[1]
    return 2 * (local_numel + 4 * rows * ceil(shape[1] / BLOCK))


def nf4_shapes(rows: int, columns: int) -> dict[str, tuple[int, int]]:
    """What a weight [rows, columns] becomes in 4 bits, by the name of each parameter: bytes of these shapes."""
    groups = ceil(rows * columns // NF4_BLOCK / NF4_GROUP)
    return dict(zip(NF4_PARTS, ((rows, columns // 2), (rows, columns // NF4_BLOCK), (groups + 1, 4)), strict=True))


def nf4_rows_at_once(rows: int, columns: int) -> int:
    """How many rows are wide at one time."""
    return min(rows, max(1, NF4_WIDE // columns))
