"""The facts that moments.py, fourbit.py, eightbit.py and plans share: what is stored in 8 and in 4 bits, and how many
bytes it takes."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from math import ceil, prod

from shardwise.errors import Problem
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.roles import is_adaptable, is_expert, is_stacked, router_of
from shardwise.spec.plan import Plan
from shardwise.techniques.variant import Traced

Shapes = Callable[[int, int, int], Mapping[str, tuple[int, int]]]
"""Of a weight by its rows, columns and experts, the names and shapes of what replaces it."""
BLOCK = 256
"""Columns that share a scale."""
LEAST = 4096
"""Elements of the smallest matrix whose moments are stored in 8 bits; all smaller ones together take little."""
NF4_BLOCK, NF4_GROUP = 64, 256
"""How many elements of a row share a scale, and how many of these scales share one."""
NF4_PARTS = ("codes", "sizes", "groups")
"""What replaces a weight that is stored in 4 bits."""
FLOAT8_BLOCK = 128
"""Rows and columns that share a scale, in the format of DeepSeek-V3's files."""
FLOAT8_BLOCKS = {"block": FLOAT8_BLOCK, "mx": 32}
"""Elements of a row that share a scale in float8; of a weight so many rows too."""
FLOAT8_PARTS = ("e4m3", "scales")
"""What replaces a weight that is stored in float8."""
STORED_BLOCK = FLOAT8_BLOCK
"""Of a weight that is stored in float8 so many rows by so many columns share a scale; proofs of small models take
fewer."""
AT_ONCE = 2**22
"""How many elements at a time are dequantised."""
SHARDS_BYTES = (2, 13)
"""The first torch release whose ``fully_shard`` accepts integer parameters."""


def quantised(shape: tuple[int, ...]) -> bool:
    """Return whether the moments of a parameter of this (global) shape are stored in 8 bits."""
    return len(shape) == 2 and prod(shape) >= LEAST


def moment_bytes(shape: tuple[int, ...], local_numel: int) -> int:
    """Bytes of both moments in 8 bits, for ``local_numel`` elements (whole rows) of a parameter."""
    rows = local_numel // shape[1]
    return 2 * (local_numel + 4 * rows * ceil(shape[1] / BLOCK))


def matrices(name: str, rows_of: Callable[[str], int]) -> int:
    """Return how many matrices the weight with this name is: one for each expert, as many as the router has rows."""
    return rows_of(router_of(name)) if is_stacked(name) else 1


def with_lengths(made: Traced, spec: ModelSpec, plan: Plan, part: str, shapes: Shapes) -> Traced:
    """Tell a unit how many rows the ``part`` has of what replaces each matrix that is stored as bytes: a sum, and no
    product. Nothing where the unit is traced in its own sizes."""
    if made.variant.concrete:
        return made
    known, told = parameter_shapes(spec), made.names(spec)
    symbols = {name: f"{part} of {name.split('.')[-2]}" for name in told if is_adaptable(name)}
    sums = tuple((symbol, f"{told[name].removesuffix('weight')}{part}") for name, symbol in symbols.items())
    numbers = {}
    for name, symbol in symbols.items():
        rows, columns = known[name]
        whole = shapes(rows, columns, matrices(name, lambda other: known[other][0]))[part][0]
        numbers[symbol] = whole // plan.layout.ep if is_expert(name) else whole  # a rank has those of its experts
    return made.told(sums=sums).bound(**numbers)


def ask_for_rows(found: dict[str, tuple[slice, ...]], weight: str, rows: tuple[int, int], columns: int) -> None:
    """Have these rows of a weight among the slices that are ``found``, with those that are asked for already."""
    first, last = rows
    if (other := found.get(weight)) is not None:
        first, last = min(first, other[0].start), max(last, other[0].stop)
    found[weight] = slice(first, last), slice(0, columns)


def unsharded_bytes(plan: Plan) -> list[Problem]:
    """Return why torch as it is installed here cannot shard weights that are stored as bytes."""
    here = importlib.metadata.version("torch")
    if not plan.sharded or tuple(map(int, here.split(".")[:2])) >= SHARDS_BYTES:
        return []
    kind = "nf4" if plan.lora is not None and plan.lora.nf4 else "float8"
    what = f"sharding {kind} weights needs torch {'.'.join(map(str, SHARDS_BYTES))} or later, and this is torch {here}"
    return [Problem("PLAN018", what, "lora.frozen", "bf16, strategy ddp, or a newer torch")]


def nf4_shapes(rows: int, columns: int, experts: int = 1) -> dict[str, tuple[int, int]]:
    """The uint8 parameters that replace a weight [rows, columns] in 4 bits: names and shapes. Of a matrix of so many
    experts each has groups of its own."""
    groups = experts * (ceil(rows // experts * columns // NF4_BLOCK / NF4_GROUP) + 1)
    return dict(zip(NF4_PARTS, ((rows, columns // 2), (rows, columns // NF4_BLOCK), (groups, 4)), strict=True))


def rows_at_once(rows: int, columns: int) -> int:
    """Return how many rows are dequantised at a time."""
    return min(rows, max(1, AT_ONCE // columns))


def dequantise_bytes(rows: int, columns: int) -> int:
    """The most that fourbit.py's operation holds besides what it is given and returns: the scales of all blocks; and of
    a round the codes as int32 (two to each), the values, and torch's table of pairs, or before them, of matrices of
    many experts, the groups' scales for all blocks."""
    scales = 4 * (rows * columns // NF4_BLOCK)
    return scales + max(scales, (4 + 2) * rows_at_once(rows, columns) * columns + 4 * 2 * 256)


def float8_shapes(rows: int, columns: int, experts: int = 1) -> dict[str, tuple[int, int]]:
    """The uint8 parameters that replace a weight [rows, columns] in float8: the codes, and the four bytes of each
    block's scale, row of blocks by row. Of a matrix of so many experts each has blocks of its own."""
    scales = experts * blocks(rows // experts) * blocks(columns)
    return dict(zip(FLOAT8_PARTS, ((rows, columns), (scales, 4)), strict=True))


def blocks(size: int) -> int:
    """Return how many blocks of a weight that is stored in float8 so many rows, or columns, are: the last may be
    smaller."""
    return -(-size // STORED_BLOCK)


def from_float8_bytes(rows: int, columns: int) -> int:
    """The most that eightbit.py's operation holds besides what it is given and returns: for each row the number of its
    row of blocks, and the scales of these."""
    return 4 * rows + 4 * rows * blocks(columns)


def row_norms_bytes(rows: int, columns: int, rank: int) -> int:
    """Return the most that dora.py's operation holds besides what it is given and returns: the product of a round, and
    where A and B are converted to fp32 (``rank`` is else 0), A and the round's rows of B."""
    at_once = rows_at_once(rows, columns)
    return 4 * (at_once * columns + rank * (columns + at_once))
