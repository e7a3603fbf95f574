"""Weights that files hold in float8, and beside each tensor its scales, with which values are to be multiplied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise.errors import Problem
from shardwise.models.quantization import USUAL, Block
from shardwise.models.tensorfile import Entry, check_finite, some

KINDS = (torch.float8_e4m3fn, torch.float8_e5m2)
NAMES = ("_scale_inv", "_scale")
"""Appended to a tensor's name: DeepSeek's, and that of compressed-tensors and others. Both are factors."""
_BYTES = (torch.float8_e8m0fnu, torch.uint8)
"""Scales that are a power of two in a byte."""


@dataclass(frozen=True)
class Scales:
    """The scales of a matrix, or of each of a stack, in a tensor of this name: one for ``rows`` x ``columns`` values,
    fewer at the edges."""

    name: str
    entry: Entry
    rows: int
    columns: int

    def transposed(self) -> Scales:
        """Return those of the transposed matrix."""
        return replace(self, rows=self.columns, columns=self.rows)

    def apply(self, values: Tensor, scales: Tensor, places: range, columns: slice) -> None:
        """Multiply ``values``, which have the rows ``places`` and these columns of a matrix, in place by its
        ``scales``."""
        if not values.numel():
            return
        above, before = places[0] // self.rows, columns.start // self.columns
        used = scales[above : places[-1] // self.rows + 1, before : -(-columns.stop // self.columns)]
        used = (used.view(torch.float8_e8m0fnu) if used.dtype == torch.uint8 else used).float()
        check_finite(used, self.name, self.entry.path)
        rows = torch.tensor(places) // self.rows - above
        for place, column in enumerate(range(before * self.columns, columns.stop, self.columns)):
            own = slice(max(0, column - columns.start), column + self.columns - columns.start)
            values[:, own].mul_(used[rows, place].unsqueeze(1))


def scales_of(
    there: Mapping[str, Entry], found: Mapping[str, Entry], blocks: Sequence[Block], where: str
) -> tuple[dict[str, Scales], list[Problem]]:
    """Return the scales of each of the tensors ``there`` that is in float8, of all ``found`` in the files; and what is
    wrong with them."""
    scales, none, unfit, blocks = dict[str, Scales](), [], [], blocks or (USUAL,)
    for name, entry in there.items():
        if entry.dtype not in KINDS:
            continue
        beside = next((name + word for word in NAMES if name + word in found), None)
        if beside is None:
            none.append(name)
        elif (fitting := _fitting(beside, found[beside], entry.shape, blocks)) is None:
            unfit.append(f"`{beside}` {list(found[beside].shape)} {found[beside].dtype} for {list(entry.shape)}")
        else:
            scales[name] = fitting
    problems = []
    if none:
        what = f"{len(none)} tensors are in float8 without scales ({' or '.join(NAMES)}): {some(none)}"
        fix = "take the files with the scales, or weights in 16 bits: without them values have another size"
        problems.append(Problem("CKPT004", what, where, fix))
    if unfit:
        sizes = ", ".join(f"{rows} x {columns}" for rows, columns in blocks)
        what = f"{len(unfit)} scales of float8 fit no blocks of {sizes}, no rows and no whole matrix: {some(unfit)}"
        fix = "the `quantization_config` that belongs to these weights, in config.json"
        problems.append(Problem("CKPT002", what, where, fix))
    return scales, problems


def _fitting(name: str, held: Entry, shape: tuple[int, ...], blocks: Sequence[Block]) -> Scales | None:
    """Return the scales in ``held`` with the blocks for which their number is right."""
    if len(shape) < 2 or not (held.dtype.is_floating_point or held.dtype in _BYTES) or held.dtype in KINDS:
        return None
    *stack, rows, columns = shape
    for height, width in (*blocks, (1, columns), (rows, columns)):
        grid = (*stack, -(-rows // height), -(-columns // width))
        shorter = [grid[:end] for end in (-1, -2) if {*grid[end:]} == {1}]
        if held.shape in (grid, *shorter):
            return Scales(name, replace(held, shape=grid), height, width)
    return None
