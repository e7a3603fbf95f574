"""Frozen weights of the blocks' linear layers are stored in float8 beside adapters (``lora.frozen: float8``): a byte
(e4m3) per weight instead of bf16's 2, and a scale in fp32 for each 128 x 128 of a matrix. Each matrix is dequantised
when it is used, on every device. Files that have weights so (DeepSeek-V3, arXiv 2412.19437) are kept as they are.

Sharded like the weights: rows of codes are gathered with their block, half the bytes of bf16. Tensor-parallel ranks
have the codes of their rows or columns and all scales, so that no cut changes a value, within a block or between two.
It pays where weights in bf16 do not fit and 4 bits lose too much. It costs the dequantisation, as nf4 does, in fewer
passes. eightbit.py is the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from shardwise.errors import Problem
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.roles import is_adaptable
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.recipe import Recipe
from shardwise.spec.sheet import At, Op, Within
from shardwise.techniques import quantised
from shardwise.techniques.quantised import (
    FLOAT8_PARTS,
    ask_for_rows,
    blocks,
    float8_shapes,
    from_float8_bytes,
    matrices,
    rows_at_once,
    unsharded_bytes,
    with_lengths,
)
from shardwise.techniques.variant import Traced

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardwise.distributed.meshes import Meshes


Slices = tuple[slice, ...]

SETTINGS = {"lora": None}
INSIDE = (
    "techniques/frozen_float8/__init__.py",
    "techniques/frozen_float8/eightbit.py",
    "techniques/quantised.py",
    "techniques/stored_matrix.py",
    "techniques/product.py",
    "techniques/share.py",
)


def stored(name: str) -> bool:
    """The technique's one fact: whether the parameter with this canonical name is kept in float8."""
    return is_adaptable(name)


def choices(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan) -> Iterator[Plan]:
    """Yield the plan as it is: float8 is a setting of the adapters."""
    yield plan


def pins(recipe: Recipe, plan: Plan) -> dict[str, tuple[object, object]]:
    return {}


def check(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[Problem]:
    """Return why the weights cannot be stored so: any matrix can, and any cut of one."""
    return unsharded_bytes(plan) if plan.lora is not None and plan.lora.float8 else []


def regimes(spec: ModelSpec, plan: Plan, trained: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """Several blocks, of which the last may not be whole, and rounds in which a matrix is dequantised."""
    shapes, on = parameter_shapes(spec), plan.lora is not None and plan.lora.float8
    each = {
        (shape[0] // matrices(name, lambda other: shapes[other][0]), shape[1])
        for name, shape in shapes.items()
        if on and stored(name)
    }
    return {
        "several blocks of a matrix in float8": any(float8_shapes(*one)["scales"][0] > 1 for one in each),
        "a block of float8 at an edge": any(size % quantised.STORED_BLOCK for one in each for size in one),
        "a matrix in float8 that is dequantised in rounds": any(rows_at_once(*one) < one[0] for one in each),
    }


def traced(made: Traced, spec: ModelSpec, plan: Plan, rank_kind: RankKind) -> Traced:
    """Count the blocks of each matrix, those at its edges too. A plan's adapters say the rest."""
    lora = made.variant.plan.lora
    return with_lengths(made, spec, plan, "scales", float8_shapes) if lora is not None and lora.float8 else made


WITHIN: Mapping[str, Callable[[Op, At], Within]] = {
    "shardwise.from_float8": lambda op, at: Within(from_float8_bytes(*map(int, op.dims))),
}


def apply(parts: list[nn.Module], plan: Plan, meshes: Meshes) -> list[nn.Module]:
    """Replace each weight by parameters of bytes, which :func:`store` fills."""
    if plan.lora is None or not plan.lora.float8:
        return parts
    from shardwise.techniques.frozen_float8.eightbit import restore
    from shardwise.techniques.stored_matrix import store_layers

    return store_layers(parts, float8_shapes, restore)


def wanted(slices: dict[str, Slices], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Slices]:
    """Ask for the whole rows of all blocks of which the rank has codes or scales."""
    found = {name: part for name, part in slices.items() if name.rpartition(".")[2] not in FLOAT8_PARTS}
    for name in slices.keys() - found.keys():
        layer, _, word = name.rpartition(".")
        weight = f"{layer}.weight"
        rows, columns = shapes[weight]
        count = matrices(weight, lambda other: shapes[other][0])
        own, each, across = slices[name][0], rows // count, blocks(columns)
        if word == "e4m3":
            first, last = _block_rows(own, each)
        else:
            first, last = own.start // across, -(-own.stop // across)
        down = blocks(each)
        first, last = (line // down * each + line % down * quantised.STORED_BLOCK for line in (first, last))
        ask_for_rows(found, weight, (first, last), columns)
    return found


def _block_rows(own: slice, each: int) -> tuple[int, int]:
    """The rows of blocks, of matrices with so many rows ``each``, in which some of these rows are: the first, and that
    behind the last."""
    first = own.start // each * blocks(each) + own.start % each // quantised.STORED_BLOCK
    return first, own.stop // each * blocks(each) + blocks(own.stop % each)


def store(
    parameters: Mapping[str, torch.Tensor], name: str, part: Slices, values: Callable[[], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """Fill the codes and scales that replace the weight, with those of the file where it has them, and hand on what
    they stand for."""
    layer = name.removesuffix("weight")
    if f"{layer}scales" not in parameters:
        return values
    import torch

    from shardwise.distributed.slices import local_slice, put
    from shardwise.models.float8 import InBlocks
    from shardwise.techniques.frozen_float8.eightbit import coded_each, dequantise_each

    codes, scales = (parameters[layer + word] for word in FLOAT8_PARTS)
    each = codes.shape[0] // matrices(name, lambda other: parameters[other].shape[0])
    rows = part[0]
    if rows.start == rows.stop:
        return values
    given = values.scales if isinstance(values, InBlocks) and values.size == quantised.STORED_BLOCK else None
    kept = coded_each(values().to(codes.device), rows.start, each, given)
    own, own_columns = local_slice(codes)
    put(codes, kept.codes[own.start - rows.start : own.stop - rows.start, own_columns])
    before = _block_rows(rows, each)[0] * blocks(codes.shape[1])
    of_blocks, _ = local_slice(scales)
    put(scales, kept.scales[of_blocks.start - before : of_blocks.stop - before])
    return lambda: dequantise_each(kept, torch.float32, rows.start, each)
