"""Counts, by layer in the steps that are sampled, what of the operands of a product in float8 its codes cannot tell.

A layer has a row for each operand in one small table on the device. Within :func:`counting` the operations that make
codes add to it; the host waits for nothing. An operation does not declare that it does so, since nothing in a graph
reads the table: compiled blocks are one graph, whether it is counted or not. Ranks that make the same codes all count
them, and so does a block that is computed again: shares and maxima are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

OPERANDS = ("input", "weight", "gradient")
"""The rows of a layer: of its input, its weight, and the gradient of what it returns."""
COUNTS = ("values", "saturated", "flushed")
"""The columns of a row that are sums; the last is the largest absolute value."""
LARGEST_CODE = 0x7E << 1 & 0xFF
"""The largest number of e4m3, its sign shifted out."""


class Counting:
    """Says whether operations count."""

    on = False


def tables(parts: Sequence[nn.Module], names: Sequence[str], device: torch.device) -> Tensor | None:
    """Give the layers of these names, of which the parts may lack some, their rows [3,4] of a table [names,3,4], fp64;
    None for no names."""
    if not names:
        return None
    table = torch.zeros(len(names), len(OPERANDS), len(COUNTS) + 1, dtype=torch.float64, device=device)
    modules = {name: module for part in parts for name, module in part.named_modules()}
    for name, rows in zip(names, table, strict=True):
        if name in modules:
            vars(modules[name])["tally"] = rows
    return table


def tally_of(layer: nn.Module) -> Tensor | None:
    """The layer's rows, if it has any."""
    found: Tensor | None = vars(layer).get("tally")
    return found


@contextmanager
def counting(table: Tensor | None) -> Iterator[None]:
    """Within it products are counted in the ``table``, from zero."""
    if table is None:
        yield
        return
    table.zero_()
    Counting.on = True
    try:
        yield
    finally:
        Counting.on = False


def count(tally: Tensor | None, operand: int, matrix: Tensor, codes: Tensor) -> None:
    """Add what the ``codes`` of a ``matrix`` cannot tell to the row of the operand: how many values there are, how many
    are at the largest code, and how many are zero that were not; and its largest absolute value."""
    if tally is None or not Counting.on:
        return
    unsigned = codes.view(torch.uint8) << 1
    saturated = (unsigned == LARGEST_CODE).sum()
    flushed = matrix.count_nonzero() - unsigned.count_nonzero()
    row = tally[operand]
    row[0] += matrix.numel()
    row[1:3] += torch.stack([saturated, flushed])
    largest = torch.linalg.vector_norm(matrix, ord=torch.inf).nan_to_num(nan=torch.inf, posinf=torch.inf)
    torch.maximum(row[3], largest.double(), out=row[3])
