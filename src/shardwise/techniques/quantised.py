"""Which moments are kept in 8 bits, and how many bytes they take: what moments.py does, on paper."""

from __future__ import annotations

from math import ceil, prod

BLOCK = 256
"""Columns that share a scale."""
LEAST = 4096
"""Elements of the smallest matrix whose moments are kept in 8 bits; all smaller ones together weigh little."""


def quantised(shape: tuple[int, ...]) -> bool:
    """Whether a parameter of this (global) shape keeps its moments in 8 bits."""
    return len(shape) == 2 and prod(shape) >= LEAST


def moment_bytes(shape: tuple[int, ...], local_numel: int) -> int:
    """Bytes of both moments of ``local_numel`` elements (whole rows) of a parameter that keeps them in 8 bits."""
    rows = local_numel // shape[1]
    return 2 * (local_numel + 4 * rows * ceil(shape[1] / BLOCK))
