"""QLoRA (Dettmers et al., arXiv 2305.14314): with adapters, the frozen weights of the blocks' linear layers are stored
in 4 bits (``lora.frozen: nf4``): 0.52 bytes per weight instead of bf16's 2. Each is dequantised when it is used. What
an expert's become does not depend on the others: each has groups of its own.

Sharded like the weights: rows of codes are gathered with their block, a quarter of the bytes of bf16. It pays when the
frozen model itself does not fit, or the network is slow. It costs the dequantisation, twice per micro-batch (three
times with full recomputation), and the rounding error of 4 bits, which the adapters learn to offset. fourbit.py is the
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING

from shardwise.errors import Problem
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.roles import is_adaptable
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.recipe import Recipe
from shardwise.spec.sheet import At, Op, Within
from shardwise.techniques.quantised import (
    NF4_BLOCK,
    NF4_GROUP,
    NF4_PARTS,
    ask_for_rows,
    dequantise_bytes,
    matrices,
    nf4_shapes,
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
    "techniques/nf4/__init__.py",
    "techniques/nf4/fourbit.py",
    "techniques/quantised.py",
    "techniques/stored_matrix.py",
    "techniques/product.py",
    "techniques/share.py",
)


def quantised(name: str) -> bool:
    """The technique's one fact: whether the parameter with this canonical name is kept in 4 bits."""
    return is_adaptable(name)


def choices(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan) -> Iterator[Plan]:
    """Yield the plan as it is: 4 bits are a setting of the adapters."""
    yield plan


def pins(recipe: Recipe, plan: Plan) -> dict[str, tuple[object, object]]:
    return {}


def check(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[Problem]:
    if plan.lora is None or not plan.lora.nf4:
        return []
    problems = []
    names = parameter_shapes(spec)
    if odd := [name for name, shape in names.items() if quantised(name) and shape[1] % NF4_BLOCK]:
        what = f"nf4 stores rows in blocks of {NF4_BLOCK}, but {odd[0]} has {names[odd[0]][1]} columns"
        problems.append(Problem("PLAN018", what, "lora.frozen", "bf16, or a model of other dimensions"))
    return [*problems, *unsharded_bytes(plan)]


def regimes(spec: ModelSpec, plan: Plan, trained: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """Groups of scales, of which the last may not be full, and rounds in which a matrix is dequantised."""
    shapes, stored = parameter_shapes(spec), plan.lora is not None and plan.lora.nf4
    each = {
        (shape[0] // matrices(name, lambda other: shapes[other][0]), shape[1])
        for name, shape in shapes.items()
        if stored and quantised(name)
    }
    return {
        "several groups of scales": any(nf4_shapes(*one)["groups"][0] > 2 for one in each),
        "a last group of scales that is not full": any(prod(one) % (NF4_BLOCK * NF4_GROUP) > 0 for one in each),
        "a matrix that is dequantised in rounds": any(rows_at_once(*one) < one[0] for one in each),
    }


def traced(made: Traced, spec: ModelSpec, plan: Plan, rank_kind: RankKind) -> Traced:
    """Count the groups of each matrix of a block, which are as many as its codes make. A plan's adapters say the
    rest."""
    lora = made.variant.plan.lora
    return with_lengths(made, spec, plan, "groups", nf4_shapes) if lora is not None and lora.nf4 else made


WITHIN: Mapping[str, Callable[[Op, At], Within]] = {
    "shardwise.dequantise": lambda op, at: Within(dequantise_bytes(*map(int, op.dims))),
}


def apply(parts: list[nn.Module], plan: Plan, meshes: Meshes) -> list[nn.Module]:
    """Replace each weight by parameters of bytes, which :func:`store` fills."""
    if plan.lora is None or not plan.lora.nf4:
        return parts
    from shardwise.techniques.nf4.fourbit import restore
    from shardwise.techniques.stored_matrix import store_layers

    return store_layers(parts, nf4_shapes, restore)


def wanted(slices: dict[str, Slices], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Slices]:
    """Ask for the whole weight, or all of an expert's, which it takes to find the groups' scales and their mean."""
    found = {name: part for name, part in slices.items() if name.rpartition(".")[2] not in NF4_PARTS}
    for name in slices.keys() - found.keys():
        layer, _, word = name.rpartition(".")
        weight = f"{layer}.weight"
        rows, columns = shapes[weight]
        count = matrices(weight, lambda other: shapes[other][0])
        each, own = nf4_shapes(rows, columns, count)[word][0] // count, slices[name][0]
        first, last = own.start // each * rows // count, -(-own.stop // each) * rows // count
        ask_for_rows(found, weight, (first, last), columns)
    return found


def store(
    parameters: Mapping[str, torch.Tensor], name: str, part: Slices, values: Callable[[], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """Quantise the weight into the parameters that replace it, and hand on what they stand for."""
    layer = name.removesuffix("weight")
    if f"{layer}codes" not in parameters:
        return values
    import torch

    from shardwise.distributed.slices import local_slice, put
    from shardwise.techniques.nf4.fourbit import dequantise_each, quantise_each

    codes = parameters[f"{layer}codes"]
    rows = codes.shape[0] // matrices(name, lambda other: parameters[other].shape[0])
    first, last = part[0].start // rows, part[0].stop // rows
    if first == last:
        return values
    kept = quantise_each(values().to(codes.device), last - first)
    for word, made in zip(NF4_PARTS, kept, strict=True):
        own, *columns = local_slice(parameters[layer + word])
        before = made.shape[0] // (last - first) * first
        put(parameters[layer + word], made[(slice(own.start - before, own.stop - before), *columns)])
    return lambda: dequantise_each(kept, last - first, torch.float32)
