"""Weights that files hold in float8, and beside each tensor its scales, with which values are to be multiplied: read as
others wrote them, and written as DeepSeek's files have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import Problem
from shardwise.models.config import ModelSpec
from shardwise.models.hf_names import Location
from shardwise.models.quantization import USUAL, Block
from shardwise.models.roles import is_adaptable, role
from shardwise.models.tensorfile import Entry, check_finite, some

KINDS = (torch.float8_e4m3fn, torch.float8_e5m2)
NAMES = ("_scale_inv", "_scale")
"""Appended to a tensor's name: DeepSeek's, and that of compressed-tensors and others. Both are factors."""
_BYTES = (torch.float8_e8m0fnu, torch.uint8)
"""Scales that are a power of two in a byte."""
WRITTEN = torch.float8_e4m3fn
"""The dtype in which weights are written beside scales."""
SCALE = NAMES[0]
LARGEST_MANTISSA, LARGEST_EXPONENT = 0.875, 9
"""The largest number of e4m3 is 448, 0.875 times 2^9."""
SMALLEST_EXPONENT = -126
"""That of the smallest scale: the inverse of a smaller one is no number of 32 or 16 bits."""


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

    def wide(self, scales: Tensor) -> Tensor:
        """Return what was read of them in fp32. Raises DataError (MOD006) where some are not finite."""
        wide = (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()
        check_finite(wide, self.name, self.entry.path)
        return wide

    def apply(self, values: Tensor, scales: Tensor, places: range, columns: slice) -> None:
        """Multiply ``values``, which have the rows ``places`` and these columns of a matrix, in place by its
        ``scales``."""
        if not values.numel():
            return
        above, before = places[0] // self.rows, columns.start // self.columns
        used = scales[above : places[-1] // self.rows + 1, before : -(-columns.stop // self.columns)]
        used = self.wide(used)
        rows = torch.tensor(places) // self.rows - above
        for place, column in enumerate(range(before * self.columns, columns.stop, self.columns)):
            own = slice(max(0, column - columns.start), column + self.columns - columns.start)
            values[:, own].mul_(used[rows, place].unsqueeze(1))


def scales_of(
    there: Mapping[str, Entry], found: Mapping[str, Entry], blocks: Sequence[Block], where: str
) -> tuple[dict[str, Scales], list[Problem]]:
    """Return the scales of each of the tensors ``there`` that is in float8, of all ``found`` in the files; and what is
    wrong with them."""
    scales = dict[str, Scales]()
    none = []
    unfit = []
    blocks = blocks or (USUAL,)
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


@dataclass(frozen=True)
class InBlocks:
    """Rows of a weight that a file has in float8: the ``values``, and the ``scales`` of the blocks that they are, of so
    many rows and columns (``size``): [rows of blocks, columns of blocks]."""

    values: Tensor
    scales: Tensor
    size: int = USUAL[0]

    def __call__(self) -> Tensor:
        return self.values


Parts = Sequence[tuple[str, Location]]
"""Parameters with rows in a tensor of the files, and which."""
JOINED = (("q", "k", "v"), ("q_a", "kv_a"))
"""Roles of matrices that vLLM and SGLang join into one: all of a layer are in float8, or none."""


def coded_names(written: Mapping[str, Parts]) -> set[str]:
    """Return the tensors of the files that are written in float8 where that is asked for: matrices of linear layers of
    blocks, and of single experts. Embeddings, the head, norms, routers and what joins a predictor's inputs never are;
    nor is what is no whole number of blocks, which readers take in different ways, nor what is joined with that."""
    coded = {name for name, parts in written.items() if _is_coded(parts)}
    joined = dict[tuple[str, int], set[str]]()
    for name, parts in written.items():
        layer, _, word = parts[0][0].removesuffix(".weight").rpartition(".")
        for number, roles in enumerate(JOINED):
            if word in roles and is_adaptable(parts[0][0]):
                joined.setdefault((layer, number), set()).add(name)
    for names in joined.values():
        if not names <= coded:
            coded -= names
    return coded


def _is_coded(parts: Parts) -> bool:
    shape = parts[0][1].shape
    blocks = len(shape) == 2 and not any(size % block for size, block in zip(shape, USUAL, strict=True))
    return blocks and all(is_adaptable(name) and role(name) != "join" for name, _ in parts)


def unwritable(spec: ModelSpec, written: Mapping[str, Parts]) -> str:
    """Return why the weights of a model cannot be written in float8; nothing where they can."""
    if spec.hf_model is not None:
        return f"{spec.name} runs in transformers' own modules"
    stacks = [name for name, parts in written.items() if len(parts[0][1].shape) > 2 and is_adaptable(parts[0][0])]
    if stacks:
        return f"files of {spec.family} have the matrices of all experts in one tensor (`{stacks[0]}`)"
    none = f"no linear layer of {spec.name} has a whole number of blocks of {USUAL[0]} x {USUAL[1]}"
    return "" if coded_names(written) else none


def scales_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return how many blocks a matrix has, one above the other and side by side."""
    rows, columns = shape
    return rows // USUAL[0], columns // USUAL[1]


def coded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix [m,n] in e4m3 and the scales of its blocks in fp32: of each the smallest power of two with which
    its largest value can be told, as products in float8 choose it. What a code stands for is its value rounded once."""
    down, across = scales_shape(matrix.shape)
    blocks = matrix.float().reshape(down, USUAL[0], across, USUAL[1])
    largest = blocks.abs().amax(dim=(1, 3))
    scales = power_of_two(exponents(largest))
    return (blocks / scales[:, None, :, None]).view(matrix.shape).to(WRITTEN), scales


def exponents(largest: Tensor) -> Tensor:
    """Return of blocks, by the largest absolute value in each, the exponent of their scale."""
    mantissas, found = torch.frexp(largest)
    return (found - LARGEST_EXPONENT + (mantissas > LARGEST_MANTISSA).int()).clamp(min=SMALLEST_EXPONENT)


def power_of_two(exponents: Tensor) -> Tensor:
    """Return 2 to these powers, from -126 to 127, in fp32: written as bits, which is exact on every device."""
    return ((exponents.int() + 127) << 23).view(torch.float32)


def config_of(beside: Sequence[str]) -> dict[str, Any]:
    """Return what a config says of such files. ``beside``: the matrices that are not in float8; of linear layers among
    them a reader has to be told."""
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [*USUAL]}
    modules = [name.removesuffix(".weight") for name in beside if name.endswith(".weight")]
    return {"quantization_config": settings | {"modules_to_not_convert": [*dict.fromkeys(["lm_head", *modules])]}}
