"""LoRA (Hu et al., arXiv 2106.09685): the model's weights are frozen, and the product of two thin, trained matrices is
added to each chosen linear layer: y = W x + alpha / rank * B A x, with A [rank, in] and B [out, rank]. Each expert of a
mixture has adapters of its own, which are one matrix for all, one expert's rows after another's, as the weights are.

Shards and sends nothing of its own: A and B are parameters of the block they are in, gathered and reduced with it, and
everything else is frozen (freeze.py), so gradients, moments and reductions shrink to a few per cent. It pays when the
state of full training does not fit, or when many adapted copies are to be stored. rsLoRA (Kalajdzievski, arXiv
2312.03732) divides by the square root of the rank. B begins at zero: step 0 is the initial model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from shardwise.errors import Problem
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.expert_families import TAKEN_FOR_EXPERTS
from shardwise.models.families import FAMILIES
from shardwise.models.family import Stack
from shardwise.models.roles import STACKED, is_adaptable, is_stacked, role
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Dtype, Lora, Plan, Precision
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.recipe import LoraSection, Recipe
from shardwise.spec.sheet import At, Op, Within
from shardwise.techniques.dtypes import chosen_dtype
from shardwise.techniques.quantised import row_norms_bytes, rows_at_once
from shardwise.techniques.states import adapted
from shardwise.techniques.variant import Traced

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from shardwise.distributed.meshes import Meshes

SETTINGS = {"lora": None}
INSIDE = (
    "techniques/lora/__init__.py",
    "techniques/lora/adapter.py",
    "techniques/lora/dora.py",
    "techniques/lora/dropout.py",
    "techniques/share.py",
)
_WHOLE = {"embed_tokens": "embed", "lm_head": "head"}
"""PEFT's names of what can be trained whole beside adapters, and ours."""
RANK = 89
"""A prime that stands for the rank where a unit is traced."""
Slices = tuple[slice, ...]
_HOOKS: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()


def settings(asked: LoraSection, precision: Precision) -> Lora | None:
    """Return what the recipe asks for, in the plan's words; None without adapters."""
    if asked.rank is None:
        return None
    default: Dtype = "bf16" if precision.compute == "bf16" else precision.weights
    frozen: Dtype = asked.frozen if asked.frozen in ("fp32", "bf16") else default
    names = [asked.targets] if isinstance(asked.targets, str) else asked.targets
    chosen = () if names == ["all-linear"] else tuple(name.removesuffix("_proj") for name in names)
    alpha = 2.0 * asked.rank if asked.alpha is None else asked.alpha
    small, eight = asked.frozen == "nf4", asked.frozen == "float8"
    whole = {_WHOLE.get(name, name) for name in asked.modules_to_save}
    ends = tuple(sorted(whole))
    return Lora(asked.rank, alpha, chosen, asked.rslora, frozen, small, asked.dropout, asked.dora, ends, eight)


def choices(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan) -> Iterator[Plan]:
    """Yield the plan with the adapters that the recipe asks for."""
    precision = Precision(chosen_dtype(recipe, cluster)[0], recipe.precision.weights)
    yield dataclasses.replace(plan, lora=settings(recipe.lora, precision))


def pins(recipe: Recipe, plan: Plan) -> dict[str, tuple[object, object]]:
    return {"lora": (plan.lora, settings(recipe.lora, plan.precision))}


def targets(lora: Lora, weight: str) -> bool:
    """The technique's one fact: whether the linear layer, or the experts, with this weight (canonical name) get an
    adapter."""
    return adapted(weight, lora)


def scale(lora: Lora) -> float:
    """Return the factor by which B A x is multiplied."""
    return lora.alpha / (lora.rank**0.5 if lora.rslora else lora.rank)


def adapters(spec: ModelSpec, lora: Lora) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter that the adapters add, by canonical name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in parameter_shapes(spec).items():
        if len(shape) == 2 and targets(lora, name):
            ranks = lora.rank * (spec.experts.num_experts if is_stacked(name) else 1)
            shapes |= _added(name.removesuffix(".weight"), shape, lora, ranks)
    return shapes


def trained(spec: ModelSpec, lora: Lora) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter that is trained: the adapters', and what is trained whole beside them."""
    whole = {name: shape for name, shape in parameter_shapes(spec).items() if lora.saves(name)}
    return adapters(spec, lora) | whole


def _added(layer: str, shape: tuple[int, ...], lora: Lora, ranks: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what an adapter adds to the layer whose weight is [out, in]. A has so many rows
    (``ranks``)."""
    wide_out, wide_in = shape
    sizes: dict[str, tuple[int, ...]] = {f"{layer}.lora_m": (wide_out,)} if lora.dora else {}
    return sizes | {f"{layer}.lora_a.weight": (ranks, wide_in), f"{layer}.lora_b.weight": (wide_out, lora.rank)}


@lru_cache(maxsize=64)
def _roles(spec: ModelSpec) -> tuple[str, ...]:
    """Return the roles of linear layers."""
    return tuple(dict.fromkeys(role(name) for name in parameter_shapes(spec) if is_adaptable(name)))


def check(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[Problem]:
    if plan.lora is None:
        return []
    problems, stacks = [], _stacks(spec)
    roles = _roles(spec)
    for name in plan.lora.targets:
        if name not in roles:
            near = get_close_matches(name, roles, 1)
            fix = f"did you mean `{near[0]}`?" if near else f"all-linear, or some of {', '.join(roles)}"
            fix = ", ".join(stacks[name]) if name in stacks else fix
            problems.append(Problem("PLAN018", f"no linear layer has the role `{name}`", "lora.targets", fix))
    problems += _check_whole(spec, plan.lora)
    if plan.precision.modules:
        what = "adapters cannot be combined with precision.modules"
        problems.append(Problem("PLAN018", what, "precision.modules", "leave out precision.modules"))
    for stack in stacks.values():
        left = [name for name in stack if name not in plan.lora.targets]
        if 0 < len(left) < len(stack):
            what = f"{spec.family} stacks {', '.join(stack)} in one layer: target all of them or none"
            problems.append(Problem("PLAN018", what, "lora.targets", f"add {', '.join(left)}"))
    of_experts = [name for name in plan.lora.targets or roles if name in STACKED]
    if plan.lora.dora and of_experts:
        what = "DoRA has no magnitudes of experts"
        others = ", ".join(name for name in roles if name not in STACKED)
        fix = f"`lora.dora: false`, or without experts: `lora.targets: [{others}]`"
        problems.append(Problem("PLAN018", what, "lora.dora", fix))
    dense = [name for name in plan.lora.targets or roles if name in ("gate", "up", "down")]
    beside = spec.experts.dense_layers or spec.experts.shared_expert_size
    if plan.lora.dora and spec.family in TAKEN_FOR_EXPERTS and beside and dense:
        what = f"PEFT cannot read magnitudes of {', '.join(dense)} in a {spec.family}, whose experts have these names"
        problems.append(Problem("PLAN018", what, "lora.dora", "false, or only layers of attention in `lora.targets`"))
    widths = {*spec.mlp_sizes, *([spec.experts.expert_size] if of_experts else [])}
    least = min(spec.hidden_size, *widths, spec.attention.num_key_value_heads * spec.attention.head_dim)
    if plan.lora.rank > least:
        what = f"rank {plan.lora.rank} exceeds the narrowest layer's {least}: an adapter would be larger than the layer"
        problems.append(Problem("PLAN018", what, "lora.rank", f"{min(16, least)}"))
    return problems


def _check_whole(spec: ModelSpec, lora: Lora) -> Iterator[Problem]:
    """Refuse what of ``modules_to_save`` cannot be trained whole."""
    key, ours = "lora.modules_to_save", tuple(_WHOLE.values())
    for name in lora.modules_to_save:
        if name not in ours:
            what = f"`{name}` is not trained whole beside adapters: only the embedding and the output layer are"
            yield Problem("PLAN018", what, key, "[embed_tokens, lm_head], or one of them")
    if spec.tie_word_embeddings and len({*ours} & {*lora.modules_to_save}) == 1:
        what = f"embedding and output layer of {spec.name} are one weight: `{lora.modules_to_save[0]}` is half of it"
        yield Problem("PLAN018", what, key, "[embed_tokens, lm_head]")


def _stacks(spec: ModelSpec) -> dict[str, list[str]]:
    """Return the layers that the family's files store as one: its name there (``qkv``), and the roles of the layers in
    it."""
    found: dict[str, list[str]] = {}
    for ours, theirs in () if spec.hf_model is not None else FAMILIES[spec.family].names.items():
        if not isinstance(theirs, Stack):  # in which are experts
            found.setdefault(theirs if isinstance(theirs, str) else theirs.name, []).append(ours.rpartition(".")[2])
    stacked = {name: roles for name, roles in found.items() if len(roles) > 1}
    return {name.rpartition(".")[2].removesuffix("_proj"): roles for name, roles in stacked.items()}


def regimes(spec: ModelSpec, plan: Plan, trained: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """Say whether norms of rows are made in rounds."""
    shapes = [shape for name, shape in parameter_shapes(spec).items() if plan.lora and targets(plan.lora, name)]
    dora = plan.lora is not None and plan.lora.dora
    return {"norms of rows in rounds": dora and any(rows_at_once(*shape) < shape[0] for shape in shapes)}


def traced(made: Traced, spec: ModelSpec, plan: Plan, rank_kind: RankKind) -> Traced:
    """Say which layers of a block have adapters, and of what kind; their rank is a symbol."""
    lora = plan.lora
    if lora is None or made.variant.what != "block":
        return made
    linear = [name for name in made.names(spec) if is_adaptable(name)]
    chosen = [role(name) for name in linear if targets(lora, name)]
    if made.variant.concrete:
        rank = lora.rank
    else:
        rank, made = RANK, made.told(atoms=(*made.variant.atoms, ("r", RANK))).bound(r=lora.rank)
    some = tuple(dict.fromkeys(chosen)) or lora.targets if len(chosen) < len(linear) else ()
    dropout = 0.5 if lora.dropout else 0.0
    kind = Lora(rank, 1.0, some, frozen=lora.frozen, nf4=lora.nf4, dropout=dropout, dora=lora.dora, float8=lora.float8)
    return made.applied(lora=kind)


WITHIN: Mapping[str, Callable[[Op, At], Within]] = {
    "shardwise.row_norms": lambda op, at: Within(row_norms_bytes(*map(int, op.dims))),
}


def apply(parts: list[nn.Module], plan: Plan, meshes: Meshes) -> list[nn.Module]:
    """Give each targeted layer two more, ``lora_a`` and ``lora_b``, whose product is added to what it returns."""
    if plan.lora is None:
        return parts
    from torch import nn

    from shardwise.models.moe import Stacked
    from shardwise.techniques.lora.adapter import attach

    for part in parts:
        for name, module in list(part.named_modules()):
            if isinstance(module, nn.Linear | Stacked) and targets(plan.lora, f"{name}.weight"):
                _HOOKS[module] = attach(module, plan.lora, scale(plan.lora))
    return parts


def wanted(slices: dict[str, Slices], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Slices]:
    """Ask for whole rows of weights in place of DoRA's magnitudes beside them, which follow from these."""
    found = {name: part for name, part in slices.items() if not name.endswith(".lora_m")}
    for name in slices.keys() - found.keys():
        weight = name.removesuffix("lora_m") + "weight"
        if weight in found:
            found[weight] = (found[weight][0], slice(0, shapes[weight][1]))
    return found


def store(
    parameters: Mapping[str, Tensor], name: str, part: Slices, values: Callable[[], Tensor]
) -> Callable[[], Tensor]:
    """Have a magnitude begin as the norms of its weight's rows, of which this rank holds the same: B is zero at first,
    so the layer is what it was."""
    magnitude = parameters.get(name.removesuffix("weight") + "lora_m")
    if magnitude is not None:
        import torch

        from shardwise.distributed.slices import local_slice, put

        rows, first = local_slice(magnitude)[0], part[0].start
        weight = values()[rows.start - first : rows.stop - first]
        put(magnitude, torch.linalg.vector_norm(weight, dim=1, dtype=torch.float64))
    return values


def merge(parts: Iterable[nn.Module], lora: Lora) -> tuple[int, list[str]]:
    """Add every adapter into its layer's weight and take it away. Return how many there were, and the layers whose
    weight is what it was although the adapter is not zero: its dtype has rounded the product away."""
    import torch

    from shardwise.techniques.lora.adapter import merged

    count, lost = 0, []
    with torch.no_grad():
        for name, module in [named for part in parts for named in part.named_modules()]:
            if module in _HOOKS:
                delta, weight = merged(module, scale(lora))
                if delta.any() and torch.equal(weight, module.get_parameter("weight")):
                    lost.append(name)
                module.get_parameter("weight").copy_(weight)
                _detach(module)
                count += 1
    return count, lost


def _detach(module: nn.Module) -> None:
    _HOOKS.pop(module).remove()
    del module.lora_a, module.lora_b
    if "lora_m" in dict(module.named_parameters(recurse=False)):
        del module.lora_m
