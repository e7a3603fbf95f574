"""QLoRA (Dettmers et al., arXiv 2305.14314): with adapters, the frozen weights of the blocks' linear layers are stored
in 4 bits (``lora.frozen: nf4``): 0.52 bytes per weight instead of bf16's 2. Each is dequantised when it is used.

Sharded like the weights: rows of codes are gathered with their block, a quarter of the bytes of bf16. It pays when the
frozen model itself does not fit, or the network is slow. It costs the dequantisation, twice per micro-batch (three
times with full recomputation), and the rounding error of 4 bits, which the adapters learn to offset. fourbit.py is the
arithmetic.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from shardwise.errors import Problem
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.roles import is_linear
from shardwise.spec.cluster import Cluster
from shardwise.spec.place import Place
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe
from shardwise.spec.sheet import At, Op, Sheet, Within
from shardwise.techniques.quantised import NF4_BLOCK, NF4_PARTS, dequantise_bytes, nf4_shapes
from shardwise.techniques.share import WHOLE, LayerShare
from shardwise.techniques.variant import Traced

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardwise.distributed.meshes import Meshes


Slices = tuple[slice, ...]
SHARDS_BYTES = (2, 13)
"""The first torch release whose ``fully_shard`` accepts integer parameters."""


INSIDE = (
    "techniques/nf4/__init__.py",
    "techniques/nf4/fourbit.py",
    "techniques/quantised.py",
    "techniques/share.py",
)


def quantised(name: str) -> bool:
    """The technique's one fact: whether the parameter with this canonical name is kept in 4 bits."""
    return is_linear(name)


def choices(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan) -> Iterator[Plan]:
    """Nothing of its own: it is a setting of the adapters."""
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


def traced(made: Traced, spec: ModelSpec, plan: Plan, place: Place) -> Traced:
    """The groups of each matrix of a block, which are as many as its codes make: a sum, and no product. A plan's
    adapters say the rest."""
    lora = made.variant.plan.lora
    if lora is None or not lora.nf4 or made.variant.concrete:
        return made
    shapes, told = parameter_shapes(spec), made.names(spec)
    groups = {name: f"groups of {name.split('.')[-2]}" for name in told if quantised(name)}
    sums = tuple((symbol, f"{told[name].removesuffix('weight')}groups") for name, symbol in groups.items())
    rows = {symbol: nf4_shapes(*shapes[name])["groups"][0] for name, symbol in groups.items()}
    return made.told(sums=sums).bound(**rows)


def cost(sheet: Sheet, plan: Plan) -> Sheet:
    """Unchanged: all is inside units."""
    return sheet


WITHIN: Mapping[str, Callable[[Op, At], Within]] = {
    "shardwise.dequantise": lambda op, at: Within(dequantise_bytes(*map(int, op.dims))),
}


def apply(parts: list[nn.Module], plan: Plan, meshes: Meshes) -> list[nn.Module]:
    """Replaces each weight by parameters of bytes, which :func:`store` fills."""
    if plan.lora is None or not plan.lora.nf4:
        return parts
    from torch import nn

    for part in parts:
        for name, module in list(part.named_modules()):
            if isinstance(module, nn.Linear) and quantised(f"{name}.weight"):
                _replace(module)
    return parts


def wanted(slices: dict[str, Slices], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Slices]:
    """It takes the whole weight to find the groups' scales and their mean."""
    found = {name: part for name, part in slices.items() if name.rpartition(".")[2] not in NF4_PARTS}
    weights = (name.removesuffix("codes") + "weight" for name in slices.keys() - found.keys() if name.endswith("codes"))
    return found | {weight: tuple(slice(0, size) for size in shapes[weight]) for weight in weights}


def store(
    parameters: Mapping[str, torch.Tensor], name: str, part: Slices, values: Callable[[], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """Quantises the weight into the parameters that replace it, and hands on what they stand for."""
    layer = name.removesuffix("weight")
    if f"{layer}codes" not in parameters:
        return values
    import torch

    from shardwise.distributed.slices import local_slice, put
    from shardwise.techniques.nf4.fourbit import dequantise, quantise

    kept = quantise(values().to(parameters[f"{layer}codes"].device))
    for word, whole in zip(NF4_PARTS, kept, strict=True):
        put(parameters[layer + word], whole[local_slice(parameters[layer + word])])
    return lambda: dequantise(*kept, torch.float32)


def _replace(module: nn.Linear) -> None:
    import torch
    from torch import nn

    from shardwise.distributed.slices import local
    from shardwise.techniques.nf4.fourbit import dequantise, linear

    device = module.weight.device
    for name, shape in nf4_shapes(*module.weight.shape).items():
        kept = torch.empty(shape, dtype=torch.uint8, device=device)
        module.register_parameter(name, nn.Parameter(kept, requires_grad=False))
    del module.weight

    def used(share: LayerShare) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        codes, absmax, group_absmax = (local(module.get_parameter(name)) for name in NF4_PARTS)
        return share.used(codes), share.used(absmax), group_absmax

    def forward(x: torch.Tensor) -> torch.Tensor:
        share: LayerShare = module.share  # type: ignore[assignment]
        added_later = module.bias is None or share.group is not None
        bias = None if added_later else share.used(local(module.bias).to(x.dtype))
        return linear(x, bias, used(share), share.piece)

    def dequantised() -> torch.Tensor:
        share: LayerShare = module.share  # type: ignore[assignment]
        return dequantise(*used(share), torch.float32, share.piece)

    module.share = WHOLE  # type: ignore[assignment]
    module.dequantised = dequantised  # type: ignore[assignment]
    module.forward = forward  # type: ignore[method-assign, assignment]
