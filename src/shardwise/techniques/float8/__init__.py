"""Products in float8 (``precision.products: float8``): linear layers and experts of blocks multiply, forward and for
the gradients of their inputs, codes of one byte; the gradients of their weights stay in the dtype of compute.

Shards nothing and keeps nothing. In blocks (DeepSeek-V3, arXiv 2412.19437; the default) 128 elements of an input or a
gradient share a scale, and 128 x 128 of a weight, so that a rank with whole blocks computes what one process does; what
would cut a block is refused. Of rows that tp cuts, ranks send each other the greatest exponents. On GPUs from Hopper on
it pays where products are large, above all with frozen weights; on a CPU it is emulated, for proofs. Output layer,
embedding, routers and norms are never in float8, nor are the first and the last block unless it is said. ``codes.py``
has codes and scales, ``scaled.py`` the products.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from shardwise.errors import Problem
from shardwise.models.blocks import spec_of
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.roles import is_adaptable, is_stacked, role
from shardwise.spec.cluster import Cluster
from shardwise.spec.devices import Device, devices
from shardwise.spec.plan import Plan, Precision, Scales
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.recipe import Recipe
from shardwise.spec.sheet import SCALED, At, Op, SentMeanwhile, Within, number
from shardwise.techniques.float8 import gathers
from shardwise.techniques.quantised import FLOAT8_BLOCK, FLOAT8_BLOCKS
from shardwise.techniques.states import division, one_of_each, use
from shardwise.techniques.variant import Traced

if TYPE_CHECKING:
    from torch import nn

    from shardwise.distributed.meshes import Meshes

SETTINGS = {"precision.products": "compute"}
INSIDE = (
    "techniques/float8/__init__.py",
    "techniques/float8/codes.py",
    "techniques/float8/scaled.py",
    "techniques/quantised.py",
    "techniques/stored_matrix.py",
    "techniques/product.py",
    "techniques/share.py",
    "techniques/tally.py",
)
WIDE_EXPERTS = 4096
"""On a GPU experts are multiplied one after another: narrower ones stay as they are, unless layers are named."""
MULTIPLES: Mapping[Scales, int] = {"block": FLOAT8_BLOCKS["block"], "mx": FLOAT8_BLOCKS["mx"], "row": 16}
"""What divides the rows and columns of a weight that is multiplied by with these scales: torch's kernel for rows asks
for whole 16 bytes. Those that depend on no cut come first."""
ENDS = ("first", "last")
"""The words for the first and the last block."""
CAPABILITY = (9, 0)
"""The first CUDA capability with products whose rows have scales, Hopper's; those of blocks of 128, cuBLAS has for it
alone, those of 32 for what came after it."""
CUBLAS: Mapping[Scales, tuple[int, int]] = {"block": (12, 9), "mx": (12, 8)}
"""The first CUDA release whose cuBLAS multiplies in such blocks."""


def in_float8(layer: str, blocks: int, precision: Precision) -> bool:
    """The technique's one fact: whether the linear layer of this name, in a model with so many blocks, multiplies in
    float8."""
    number = int(layer.split(".")[1])
    ends = {"first": 0, "last": blocks - 1}
    return not any(number == ends[word] if word in ends else fnmatchcase(layer, word) for word in precision.exclude)


@lru_cache(maxsize=64)
def _candidates(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The layers that could be, and the shapes of their weights, of experts that of one: of what predicts further
    tokens none."""
    found = dict[str, tuple[int, ...]]()
    for name, shape in parameter_shapes(spec).items():
        if is_adaptable(name) and len(shape) == 2:
            layer = name.rpartition(".")[0]
            if not spec.predicts(int(layer.split(".")[1])):
                found[layer] = (shape[0] // spec.experts.num_experts, shape[1]) if is_stacked(name) else shape
    return found


def layers(spec: ModelSpec, precision: Precision) -> dict[str, tuple[int, ...]]:
    """Return the layers of a model that multiply in float8, and the shapes of their weights."""
    if precision.products == "compute":
        return {}
    blocks = spec.num_hidden_layers - spec.predictors
    return {name: shape for name, shape in _candidates(spec).items() if in_float8(name, blocks, precision)}


def choices(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan) -> Iterator[Plan]:
    """Yield the plan with what the recipe says: no search turns it on. Where it names no layers that are to stay as
    they are, those of the ends stay, those whose sizes no kernel serves, and on GPUs narrow experts."""
    asked = recipe.precision
    if asked.products == "compute":
        yield plan
        return
    exclude, reason = tuple(asked.exclude or ()), "pinned"
    if asked.exclude is None:
        exclude, reason = ENDS, "default: gradients are most easily lost in the first and the last block"
        settings = dataclasses.replace(plan.precision, products=asked.products, scales=asked.scales, exclude=ENDS)
        if odd := tuple(dict.fromkeys(f"*.{name.rpartition('.')[2]}" for name in _odd(spec, settings))):
            exclude += odd
            reason += f"; of {', '.join(odd)} {MULTIPLES[asked.scales]} is no divisor of a size"
        if cluster.kind == "cuda" and 0 < spec.experts.expert_size < WIDE_EXPERTS:
            exclude += ("*.expert_*",)
            reason += f"; experts narrower than {WIDE_EXPERTS:,} lose more by a launch for each than they gain"
    settings = dataclasses.replace(
        plan.precision, products=asked.products, scales=asked.scales, exclude=exclude, gather=asked.gather
    )
    scales = "pinned" if "scales" in asked.model_fields_set else "default: as exact under every layout as on one device"
    why = {"precision.products": "pinned", "precision.scales": scales, "precision.exclude": reason}
    why |= {gathers.KEY: "pinned"} if "gather" in asked.model_fields_set else {}
    yield dataclasses.replace(plan, precision=settings, why={**plan.why, **why})


def proposed(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan) -> Plan | None:
    """Return a plan in bf16 with products in float8, where the GPUs have them, and nothing stands against it."""
    if cluster.kind == "cpu" or plan.precision.compute != "bf16" or plan.precision.products != "compute":
        return None
    for scales in MULTIPLES:
        asked = recipe.precision.model_copy(update={"products": "float8", "scales": scales, "exclude": None})
        (found,) = choices(recipe.model_copy(update={"precision": asked}), spec, cluster, plan)
        if not check(spec, found, cluster):
            return found
    return None


def pins(recipe: Recipe, plan: Plan) -> dict[str, tuple[object, object]]:
    asked, planned = recipe.precision, plan.precision
    on = "float8" in (asked.products, planned.products)
    words = "auto" if asked.exclude is None else ", ".join(asked.exclude)
    return {
        "precision.products": (planned.products, asked.products),
        "precision.scales": (planned.scales, asked.scales if on else "auto"),
        "precision.exclude": (", ".join(planned.exclude), words),
        gathers.KEY: (planned.gather, asked.gather),
    }


def regimes(spec: ModelSpec, plan: Plan, trained: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """Return what is beside weights that are gathered as codes. Else a layer's name decides whether it is in float8,
    and whole blocks are computed alike, however many there are."""
    others = gathers.divided(spec, plan, layers(spec, plan.precision))[1] if plan.precision.gather == "float8" else []
    return {"a weight in float8 of which ranks have no whole blocks": bool(others)}


def check(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[Problem]:
    """Return why the plan's products cannot be in float8: where the device, or a layer's sizes, or another setting of
    the plan stands against it, and where results would depend on the layout."""
    if plan.precision.products == "compute":
        return []
    found = layers(spec, plan.precision)
    problems = [*_of_device(plan, cluster), *_beside(spec, plan)]
    if plan.precision.gather == "float8" and spec.hf_model is None:
        problems += gathers.problems(spec, plan, found)
    key = "precision.exclude"
    for pattern in plan.precision.exclude:
        if pattern not in ENDS and not any(fnmatchcase(name, pattern) for name in _candidates(spec)):
            what = f"`{pattern}` matches no linear layer of a block of {spec.name}"
            problems.append(Problem("PLAN012", what, key, "a glob such as `*.down` or `layers.3.*`, `first` or `last`"))
    if not found:
        what = f"no linear layer of {spec.name} is left to multiply in float8"
        fix = "name fewer layers (`exclude: []` names none), or `precision.products: compute`"
        problems.append(Problem("PLAN012", what, key, fix))
    if odd := _odd(spec, plan.precision):
        name, multiple = odd[0], MULTIPLES[plan.precision.scales]
        what = f"`{name}` is {' x '.join(map(str, found[name]))}, and float8 with `scales: {plan.precision.scales}` "
        what += f"takes sizes that {multiple} divides"
        problems.append(Problem("PLAN012", what, key, _excluding(odd, plan)))
    elif reasons := _cut(spec, plan):
        what = "; ".join(dict.fromkeys(reasons.values()))
        problems.append(Problem("PLAN012", what, "parallel.tp", f"{_excluding([*reasons], plan)}; or fewer ranks"))
    return problems


def reasons(spec: ModelSpec, plan: Plan) -> dict[str, str]:
    """Return why settings are what they are, as far as the whole plan says it."""
    if plan.precision.gather == "compute":
        return {}
    return {gathers.KEY: gathers.reason(spec, plan, layers(spec, plan.precision))}


def _excluding(names: list[str], plan: Plan) -> str:
    """The key that leaves out the layers with these names, in whatever block."""
    more = dict.fromkeys((*plan.precision.exclude, *(f"*.{name.rpartition('.')[2]}" for name in names)))
    return f"`precision.exclude: [{', '.join(word if word in ENDS else repr(word) for word in more)}]`"


def _odd(spec: ModelSpec, precision: Precision) -> list[str]:
    """The layers with sizes that no kernel serves: of layers that are called alike the first."""
    multiple, found = MULTIPLES[precision.scales], dict[str, str]()
    for name, shape in layers(spec, precision).items():
        if any(size % multiple for size in shape):
            found.setdefault(role(f"{name}.weight"), name)
    return [*found.values()]


def _cut(spec: ModelSpec, plan: Plan) -> dict[str, str]:
    """Why tensor parallelism would change results, by the layer's name: ranks would find maxima of parts of blocks, or
    of parts of a sum; of rows that are cut they tell each other the greatest."""
    ranks = plan.layout.tp
    how = division(spec, plan)
    found = dict[str, str]()
    if ranks == 1:
        return found
    named = one_of_each({f"{name}.weight": shape for name, shape in layers(spec, plan.precision).items()})
    for weight, shape in named.items():
        name, used = weight.removesuffix(".weight"), use(weight, how)
        if used == "own":
            found[name] = f"over {ranks} ranks of tp, of whose gradients each has a part of the sum: `{name}`"
        elif used != "stream":
            dim = int(used == "inputs")
            what = f"`{name.rpartition('.')[2]}` has {shape[dim]} {('rows', 'columns')[dim]}"
            if shape[dim] % (ranks * (each := MULTIPLES[plan.precision.scales])):
                found[name] = f"{what}, of which {ranks} ranks of tp would not have whole blocks of {each}"
    return found


def _beside(spec: ModelSpec, plan: Plan) -> Iterator[Problem]:
    """Yield what else of the plan cannot be there."""
    key, fix = "precision.products", "compute"
    if spec.hf_model is not None:
        yield Problem("PLAN012", f"{spec.name} runs in transformers' own modules, not in float8", key, fix)
    if plan.precision.modules:
        what = "precision.modules cannot be combined with products in float8"
        yield Problem("PLAN012", what, "precision.modules", "leave it out, or name the layers in precision.exclude")
    if plan.lora is not None and plan.lora.nf4:
        what = "frozen weights in 4 bits are multiplied as they are dequantised, not in float8"
        yield Problem("PLAN012", what, key, "compute, or `lora.frozen: float8`")
    if plan.layout.pp > 1 and plan.pipeline.spec.splits_backward:
        what = (
            f"the schedule {plan.pipeline.schedule} makes gradients of weights apart, which products in float8 do not"
        )
        yield Problem("PLAN012", what, "parallel.schedule", "1f1b or interleaved; or `precision.products: compute`")


def _of_device(plan: Plan, cluster: Cluster) -> Iterator[Problem]:
    """Yield why the devices, or torch as it is installed here, cannot multiply so; a CPU emulates it."""
    if cluster.kind == "cpu":
        return
    device = cluster.device
    scales = plan.precision.scales
    key = "precision.products"
    able = [one for one in devices().values() if _able(one.capability, "row")]
    if not _able(device.capability, "row"):
        has = (
            f"{device.name} has CUDA capability {'.'.join(map(str, device.capability))}"
            if device.capability
            else (f"{device.name} is no CUDA device with products in float8 that are known")
        )
        what = f"products in float8 need GPUs of CUDA capability 9.0 or later ({_named(able)}): {has}"
        yield Problem("PLAN012", what, key, "compute")
    elif not _able(device.capability, scales):
        what = f"cuBLAS has products with scales of blocks of {FLOAT8_BLOCKS[scales]} for "
        what += f"{_named([one for one in able if _able(one.capability, scales)])}, not for {device.name}"
        others = [one for one in MULTIPLES if _able(device.capability, one)]
        yield Problem("PLAN012", what, "precision.scales", " or ".join(others))
    if plan.precision.compute != "bf16":
        what = f"on GPUs products in float8 come out in bf16, and it is computed in {plan.precision.compute}"
        yield Problem("PLAN012", what, "precision.compute", "bf16")
    if (first := CUBLAS.get(scales)) and (here := _cublas()) and here < first:
        what = f"products with scales of blocks need CUDA {'.'.join(map(str, first))} or later, and torch is installed"
        what += f" here with cuBLAS {'.'.join(map(str, here))}"
        yield Problem("PLAN012", what, "precision.scales", "row, or torch for a newer CUDA")


def _able(capability: tuple[int, int] | None, scales: Scales) -> bool:
    if capability is None or capability < CAPABILITY:
        return False
    return scales == "row" or (scales == "block") == (capability[0] == CAPABILITY[0])


def scales_on(capability: tuple[int, int] | None) -> list[Scales]:
    """Return the scales with which a device of this capability, and torch as it is installed here, multiply."""
    here = _cublas()
    new = {scales for scales in MULTIPLES if not here or here >= CUBLAS.get(scales, (0, 0))}
    return [scales for scales in MULTIPLES if scales in new and _able(capability, scales)]


def _named(found: list[Device]) -> str:
    return ", ".join(one.name for one in found)


@cache
def _cublas() -> tuple[int, ...] | None:
    """The release of the cuBLAS that torch was installed with here; None where that is not known, or torch is for
    CPUs."""
    for name in ("nvidia-cublas", "nvidia-cublas-cu12"):
        try:
            return tuple(map(int, importlib.metadata.version(name).split(".")[:2]))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def traced(made: Traced, spec: ModelSpec, plan: Plan, rank_kind: RankKind) -> Traced:
    """Name, of a block with layers in float8, those that are not: whatever their sizes are there."""
    told = {name.rpartition(".")[0]: other.rpartition(".")[0] for name, other in made.names(spec).items()}
    found, precision = layers(spec, plan.precision), plan.precision
    if found.keys().isdisjoint(told):
        return made
    others = tuple(sorted(told[name] for name in told if name in _candidates(spec) and name not in found))
    named = dataclasses.replace(
        made.variant.plan.precision, products=precision.products, scales=precision.scales, exclude=others
    )
    return made.applied(precision=named)


def workspace_bytes(op: Op, at: At) -> Within:
    """The most that a product holds beside what it is given and makes: where it is emulated what the codes of its input
    stand for, then of the weight that and its codes; or before them those of the input, and its scales, counted as of
    blocks of 128 (of MX they are up to a hundredth of all more). On a GPU, which multiplies codes, it is less. Where
    ranks have parts of the rows it sends an exponent for each."""
    groups, m, n, k = (number(dim, (at.b, at.s)) for dim in op.dims)
    left, right = m * k, groups * n * k
    held = max((at.width + 1) * left, at.width * left + (at.width + 1) * right) + 4 * (left // FLOAT8_BLOCK)
    return Within(held, (SentMeanwhile("all_reduce", 4 * (m + n)),) if op.axis else ())


OVER_RANKS = tuple(f"{name}_over_ranks" for name in SCALED)
WITHIN = dict.fromkeys((*SCALED, *OVER_RANKS), workspace_bytes)


def steps_of(operation: str) -> Callable[..., Any] | None:
    """Return what an operation of this technique's own does, operation by operation."""
    if operation.replace("::", ".") not in OVER_RANKS:
        return None
    from shardwise.techniques.float8 import scaled

    return scaled.product if "product" in operation else scaled.gradient


def apply(parts: list[nn.Module], plan: Plan, meshes: Meshes) -> list[nn.Module]:
    """Have linear layers and experts multiply in float8, by their names."""
    from torch import nn

    from shardwise.models.moe import Stacked
    from shardwise.techniques.float8.codes import WeightCodes
    from shardwise.techniques.float8.scaled import Scaling, multiply_scaled

    spec, scales = spec_of(parts), plan.precision.scales
    found, divided = layers(spec, plan.precision), division(spec, plan)
    group = str(meshes.groups["tp"].group_name) if scales == "row" and plan.layout.tp > 1 else ""
    gathered = gathers.divided(spec, plan, found)[0] if plan.precision.gather == "float8" else []
    for part in parts:
        for name, module in part.named_modules():
            if type(module) in (nn.Linear, Stacked) and name in found:
                used = use(f"{name}.weight", divided) if group else ""
                forward, back = (group * (used == dim) for dim in ("inputs", "outputs"))
                multiply_scaled(module, Scaling(scales, plan.compile, forward, back, name in gathered))
                if name in gathered:
                    vars(module)["gathered_as"] = WeightCodes(module, plan.compile)
    return parts
