"""Data types of compute, weights and reduction.

Shards nothing and sends nothing: it sets the dtype of everything else. Weights and both moments are stored in
``weights``, fp32 unless the recipe says otherwise (with adapters, the model's own frozen weights in ``lora.frozen``);
forward and backward run in ``compute``; gradients are sent and summed in ``reduce``. bf16 halves activations and
gathered weights, and pays on every device with bf16 matrix units; fp16 needs loss scaling (runtime/step.py). FSDP2
casts sharded weights as it gathers them (``shard.apply`` passes it the dtypes); otherwise each layer casts its weight
when it uses it, and the copy lives until the layer's backward has run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from copy import copy
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shardwise.errors import Problem
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.mixers import mixers_of
from shardwise.models.roles import is_adapter, is_counted, role
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Dtype, Matmul, Plan, Precision
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.recipe import Recipe
from shardwise.spec.sheet import KEPT_UNITS, Sheet, Unit
from shardwise.techniques.dtypes import chosen_dtype, compute_dtype, stored_dtype, torch_dtype
from shardwise.techniques.variant import Traced

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardwise.distributed.meshes import Meshes


INSIDE = ("techniques/precision.py", "techniques/dtypes.py", "techniques/product.py", "techniques/share.py")


NO_REGIMES = "a module's name alone decides the dtype that it computes in"
"""Why no size of a model or a plan makes its code take another path."""


def choices(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan) -> Iterator[Plan]:
    """Yield the plan in the dtypes that the recipe names; what it leaves out follows from the device."""
    asked = recipe.precision
    compute, reason = chosen_dtype(recipe, cluster)
    why = {"precision.compute": reason, "precision.weights": "recipe: planning never changes the master weights"}
    matmul: Matmul = "highest" if asked.matmul == "auto" else asked.matmul
    why["precision.reduce"] = "pinned" if asked.reduce else "default: gradients are summed in fp32"
    reduce = asked.reduce or ("fp64" if compute == "fp64" else "fp32")
    settings = Precision(compute, asked.weights, reduce, tuple(asked.modules.items()), matmul)
    yield dataclasses.replace(plan, precision=settings, why={**plan.why, **why})


def pins(recipe: Recipe, plan: Plan) -> dict[str, tuple[object, object]]:
    asked, planned = recipe.precision, plan.precision
    return {
        "precision.compute": (planned.compute, asked.compute),
        "precision.weights": (planned.weights, asked.weights),
        "precision.reduce": (planned.reduce, asked.reduce or "auto"),
        "precision.modules": (_words(planned.modules), _words(asked.modules.items()) or "auto"),
        "precision.matmul": (planned.matmul, asked.matmul),
    }


def _words(modules: Iterable[tuple[str, Dtype]]) -> str:
    return ", ".join(f"{pattern}: {dtype}" for pattern, dtype in modules)


def check(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[Problem]:
    precision = plan.precision
    problems = []
    if precision.compute == "fp16" and precision.weights == "fp16":
        what = "fp16 weights lose most updates: their steps are below fp16's resolution"
        problems.append(Problem("PLAN012", what, "precision.weights", "fp32 (or bf16)"))
    if precision.weights == "bf16" and precision.compute == "fp32":
        what = "computing in fp32 with weights in bf16 takes twice the time and gains no accuracy"
        problems.append(Problem("PLAN012", what, "precision.compute", "bf16, or weights fp32"))
    if precision.reduce == "bf16" and precision.compute == "fp64":
        problems.append(Problem("PLAN012", "gradients of fp64 would be reduced in bf16", "precision.reduce", "fp64"))
    if precision.modules and plan.sharded and plan.remat.mode == "selective" and plan.compile:
        # Seen with torch 2.13: its selective checkpointing counts operations that FSDP2's inner units do once only.
        what = "compiled, selective recompute does not work with sharded modules that have their own compute dtype"
        problems.append(Problem("PLAN016", what, "recompute.mode", "full or none; or `compile=false`"))
    if precision.modules and _beyond_llama(spec):
        what = f"{spec.name} has norms, sinks or multipliers that Llama lacks: precision.modules does not support them"
        problems.append(Problem("PLAN016", what, "precision.modules", "leave out precision.modules"))
    head = compute_dtype(precision, "head")
    if head != precision.compute:
        what = f"the output layer is set to compute in {head}, but it is fused with the loss, which computes in "
        fix = "leave `head` out of precision.modules"
        problems.append(Problem("PLAN012", what + precision.compute, "precision.modules", fix))
    names = parameter_shapes(spec) if precision.modules else {}
    norms = [name.rpartition(".")[0] for name in names if role(name) == "norm"]
    able = dict.fromkeys(("fp32", precision.compute) if precision.compute in ("bf16", "fp16") else (precision.compute,))
    if asked := {compute_dtype(precision, norm) for norm in norms} - set(able):
        what = f"norms are set to compute in {', '.join(sorted(asked))}"
        problems.append(Problem("PLAN012", what, "precision.modules", " or ".join(able)))
    return problems


def _beyond_llama(spec: ModelSpec) -> bool:
    """Return whether blocks, embedding or head have operations that no test has seen under ``precision.modules``."""
    multipliers = (spec.embedding_multiplier, spec.residual_multiplier, spec.logits_scaling)
    norms = spec.attention.qk_norm is not None or spec.norm_plus_one or spec.norm_placement != "before"
    mixers = {mixer.name for mixer in mixers_of(spec)} != {"softmax"} or spec.attention.attention_sinks
    other = mixers or bool(spec.positions.nope_layers) or spec.hf_model is not None
    other = other or spec.experts.sigmoid is not None or spec.experts.softmax_groups is not None
    return norms or set(multipliers) != {1.0} or other


def traced(made: Traced, spec: ModelSpec, plan: Plan, rank_kind: RankKind) -> Traced:
    """The dtypes of a unit: what is computed in, and what its weights come in. FSDP2 hands them out as they are used;
    otherwise they are cast in the unit."""
    names, compute = made.names(spec), plan.precision.compute
    modules: dict[str, Dtype] = {}
    for name, told in names.items() if plan.precision.modules else ():
        module = name.rpartition(".")[0]
        if (dtype := compute_dtype(plan.precision, module)) != compute:
            modules[told.rpartition(".")[0]] = dtype
    lora = made.variant.plan.lora
    adapted = plan.precision.weights if lora is not None else stored_dtype(plan, next(iter(names)))
    weights, frozen = (compute, compute) if plan.sharded else (adapted, adapted if lora is None else lora.frozen)
    every = (compute, weights, frozen, *modules.values())
    # fp16 is as large as bf16 and runs the same program: unless both are there, one trace serves both.
    stand: dict[Dtype, Dtype] = {dtype: dtype for dtype in every}
    if "fp16" in stand and "bf16" not in stand:
        stand["fp16"], made = "bf16", dataclasses.replace(made, dtypes={"bf16": "fp16"})
    own = tuple((name, stand[dtype]) for name, dtype in modules.items())
    made = made.told(gathered=plan.sharded and bool(modules))
    made = made.applied(precision=Precision(stand[compute], stand[weights], modules=own))
    return made if lora is None else made.applied(lora=dataclasses.replace(lora, frozen=stand[frozen]))


def cost(sheet: Sheet, plan: Plan) -> Sheet:
    """Sharded, weights are stored in a dtype of their own; a unit has them as they are gathered."""
    if not plan.sharded:
        return sheet
    own, frozen = plan.precision.weights, stored_dtype(plan, "layers.")
    ends = {"embedding": stored_dtype(plan, "embed.weight"), "head": stored_dtype(plan, "head.weight")}
    return sheet.rewritten(lambda unit: _stored(unit, own, ends.get(unit.name, frozen)))


@lru_cache(maxsize=KEPT_UNITS)
def _stored(unit: Unit, own: Dtype, frozen: Dtype) -> Unit:
    """``frozen``: the dtype of weights that are no adapters. Bytes of codes stay bytes, and what follows from counts
    as it is."""
    kept = [
        weight
        if weight.dtype == "uint8" or is_counted(weight.name)
        else weight.typed(own if is_adapter(weight.name) else frozen, weight.used_as)
        for weight in unit.weights
    ]
    return dataclasses.replace(unit, weights=tuple(kept))


def apply(parts: list[nn.Module], plan: Plan, meshes: Meshes) -> list[nn.Module]:
    """Sets the dtype of the weights. Without FSDP2, linear and embedding layers cast their weights when they use
    them."""
    from torch import nn

    from shardwise.models.hf_model import HFDecoder
    from shardwise.models.layers import Head
    from shardwise.techniques.product import product_of

    outside = torch_dtype(plan.precision.compute)
    for part in parts:
        for name, parameter in part.named_parameters():
            parameter.data = parameter.data.to(torch_dtype(stored_dtype(plan, name)))
        if plan.sharded:
            continue
        for name, module in part.named_modules():
            inside = torch_dtype(compute_dtype(plan.precision, name))
            casts = type(module) in (nn.Linear, nn.Embedding) and module.weight.dtype != inside
            if isinstance(part, HFDecoder) and not casts and not isinstance(module, Head):  # which casts by itself
                _cast_parameters(module, inside)
            elif casts or (inside != outside and next(module.parameters(recurse=False), None) is not None):
                product_of(module, inside, outside)
    return parts


def _cast_parameters(module: nn.Module, inside: torch.dtype) -> None:
    """Have the parameters of any other module appear in the dtype ``inside`` during its forward."""
    from torch.func import functional_call

    if any(parameter.dtype != inside for parameter in module.parameters(recurse=False)):
        plain = copy(module)  # has the same parameters, and the forward of its class

        def forward(*args: Any, **kwargs: Any) -> Any:
            cast = {name: parameter.to(inside) for name, parameter in module.named_parameters(recurse=False)}
            return functional_call(plain, cast, args, kwargs)

        module.forward = forward
