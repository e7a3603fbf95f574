"""QLoRA (Dettmers et al., arXiv 2305.14314): with adapters, the frozen weights of the blocks' linear layers are stored
in 4 bits (``lora.frozen: nf4``): 0.52 bytes per weight instead of bf16's 2. Each is dequantised when it is used. What
an expert's become does not depend on the others: each has groups of its own.

Sharded like the weights: rows of codes are gathered with their block, a quarter of the bytes of bf16. It pays when the
frozen model itself does not fit, or the network is slow. It costs the dequantisation, twice per micro-batch (three
times with full recomputation), and the rounding error of 4 bits, which the adapters learn to offset. fourbit.py is the
arithmetic.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING

from shardwise.errors import Problem
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.roles import is_adaptable, is_expert, is_stacked, router_of
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.recipe import Recipe
from shardwise.spec.sheet import At, Op, Within
from shardwise.techniques.quantised import (
    NF4_BLOCK,
    NF4_GROUP,
    NF4_PARTS,
    dequantise_bytes,
    nf4_rows_at_once,
    nf4_shapes,
)
from shardwise.techniques.variant import Traced

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardwise.distributed.meshes import Meshes
    from shardwise.models.moe import Stacked


Slices = tuple[slice, ...]
SHARDS_BYTES = (2, 13)
"""The first torch release whose ``fully_shard`` accepts integer parameters."""

SETTINGS = {"lora": None}
INSIDE = (
    "techniques/nf4/__init__.py",
    "techniques/nf4/fourbit.py",
    "techniques/quantised.py",
    "techniques/product.py",
    "techniques/share.py",
)


def quantised(name: str) -> bool:
    """The technique's one fact: whether the parameter with this canonical name is kept in 4 bits."""
    return is_adaptable(name)


def matrices(name: str, rows_of: Callable[[str], int]) -> int:
    """Return how many matrices the weight with this name is: one for each expert, as many as the router has rows."""
    return rows_of(router_of(name)) if is_stacked(name) else 1


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
    here = importlib.metadata.version("torch")
    if plan.sharded and tuple(map(int, here.split(".")[:2])) < SHARDS_BYTES:
        since = ".".join(map(str, SHARDS_BYTES))
        what = f"sharding nf4 weights needs torch {since} or later, and this is torch {here}"
        problems.append(Problem("PLAN018", what, "lora.frozen", "bf16, strategy ddp, or a newer torch"))
    return problems


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
        "a matrix that is dequantised in rounds": any(nf4_rows_at_once(*one) < one[0] for one in each),
    }


def traced(made: Traced, spec: ModelSpec, plan: Plan, rank_kind: RankKind) -> Traced:
    """Count the groups of each matrix of a block, which are as many as its codes make: a sum, and no product. A plan's
    adapters say the rest."""
    lora = made.variant.plan.lora
    if lora is None or not lora.nf4 or made.variant.concrete:
        return made
    shapes, told = parameter_shapes(spec), made.names(spec)
    groups = {name: f"groups of {name.split('.')[-2]}" for name in told if quantised(name)}
    sums = tuple((symbol, f"{told[name].removesuffix('weight')}groups") for name, symbol in groups.items())
    numbers = {}
    for name, symbol in groups.items():
        (rows, columns), count = shapes[name], matrices(name, lambda other: shapes[other][0])
        whole = nf4_shapes(rows, columns, count)["groups"][0]
        numbers[symbol] = whole // plan.layout.ep if is_expert(name) else whole  # a rank has those of its experts
    return made.told(sums=sums).bound(**numbers)


WITHIN: Mapping[str, Callable[[Op, At], Within]] = {
    "shardwise.dequantise": lambda op, at: Within(dequantise_bytes(*map(int, op.dims))),
}


def apply(parts: list[nn.Module], plan: Plan, meshes: Meshes) -> list[nn.Module]:
    """Replace each weight by parameters of bytes, which :func:`store` fills."""
    if plan.lora is None or not plan.lora.nf4:
        return parts
    from torch import nn

    from shardwise.models.moe import Stacked

    for part in parts:
        for name, module in list(part.named_modules()):
            if isinstance(module, nn.Linear | Stacked) and quantised(f"{name}.weight"):
                _replace(module)
    return parts


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
        if (other := found.get(weight)) is not None:
            first, last = min(first, other[0].start), max(last, other[0].stop)
        found[weight] = (slice(first, last), slice(0, columns))
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


def _replace(module: nn.Linear | Stacked) -> None:
    import torch
    from torch import nn

    from shardwise.models.moe import Stacked
    from shardwise.techniques.product import product_of

    device, (rows, columns) = module.weight.device, module.weight.shape
    experts = module.experts if isinstance(module, Stacked) else 1
    for name, shape in nf4_shapes(rows, columns, experts).items():
        kept = torch.empty(shape, dtype=torch.uint8, device=device)
        module.register_parameter(name, nn.Parameter(kept, requires_grad=False))
    del module.weight
    product_of(module).multiply = _of_experts(module) if isinstance(module, Stacked) else _linear(module)


def _of_experts(module: Stacked) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the product with matrices in 4 bits, of the experts that this rank has."""
    from shardwise.distributed.slices import local
    from shardwise.models.moe import of_owners, taken
    from shardwise.techniques.nf4.fourbit import stacked

    def multiply(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        codes, absmax, group_absmax = (local(module.get_parameter(name)) for name in NF4_PARTS)
        out = stacked(taken(x), counts, (codes, absmax, group_absmax), module.rows)
        return out if module.bias is None else out + of_owners(local(module.bias), counts, out)

    return multiply


def _linear(module: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the product with a matrix in 4 bits, of which the layer can also give the values (``dequantised``)."""
    import torch

    from shardwise.distributed.slices import local
    from shardwise.techniques.nf4.fourbit import dequantise, linear
    from shardwise.techniques.product import bias_of, share_of

    def used() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        share = share_of(module)
        codes, absmax, group_absmax = (local(module.get_parameter(name)) for name in NF4_PARTS)
        return share.used(codes), share.used(absmax), group_absmax

    def multiply(x: torch.Tensor) -> torch.Tensor:
        return linear(x, bias_of(module, x.dtype), used(), share_of(module).piece)

    def dequantised() -> torch.Tensor:
        return dequantise(*used(), torch.float32, share_of(module).piece)

    module.dequantised = dequantised  # type: ignore[assignment]
    return multiply
