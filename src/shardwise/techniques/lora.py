"""LoRA (Hu et al., arXiv 2106.09685): the model's weights are frozen, and the product of two thin, trained matrices is
added to each chosen linear layer: y = W x + alpha / rank * B A x, with A [rank, in] and B [out, rank].

Shards and sends nothing of its own: A and B are parameters of the block they are in, gathered and reduced with it, and
everything else is frozen (freeze.py), so gradients, moments and reductions shrink to a few per cent. It pays when the
state of full training does not fit, or when many adapted copies are to be stored. rsLoRA (Kalajdzievski, arXiv
2312.03732) divides by the square root of the rank. B begins at zero: step 0 is the initial model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from shardwise.errors import Problem
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.families import FAMILIES
from shardwise.models.roles import is_linear, role
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Dtype, Lora, Plan, Precision
from shardwise.spec.recipe import LoraSection, Recipe
from shardwise.spec.sheet import KEPT_UNITS, Sheet, Tensor, Unit
from shardwise.techniques.cells import name_of, splice
from shardwise.techniques.draft import Draft
from shardwise.techniques.dtypes import chosen_dtype
from shardwise.techniques.quantised import nf4_rows_at_once

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from shardwise.distributed.meshes import Meshes


_HOOKS: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()


def settings(asked: LoraSection, precision: Precision) -> Lora | None:
    """What the recipe asks for, in the plan's words; None without adapters."""
    if asked.rank is None:
        return None
    narrow: Dtype = "bf16" if precision.compute == "bf16" else precision.weights
    frozen: Dtype = asked.frozen if asked.frozen in ("fp32", "bf16") else narrow
    names = [asked.targets] if isinstance(asked.targets, str) else asked.targets
    chosen = () if names == ["all-linear"] else tuple(name.removesuffix("_proj") for name in names)
    alpha = 2.0 * asked.rank if asked.alpha is None else asked.alpha
    small = asked.frozen == "nf4"
    return Lora(asked.rank, alpha, chosen, asked.rslora, frozen, small, asked.dropout, asked.dora)


def choices(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan) -> Iterator[Plan]:
    """What the recipe says."""
    precision = Precision(chosen_dtype(recipe, cluster)[0], recipe.precision.weights)
    yield dataclasses.replace(plan, lora=settings(recipe.lora, precision))


def pins(recipe: Recipe, plan: Plan) -> dict[str, tuple[object, object]]:
    return {"lora": (plan.lora, settings(recipe.lora, plan.precision))}


def targets(lora: Lora, weight: str) -> bool:
    """The technique's one fact: whether the linear layer with this weight (canonical name) gets an adapter."""
    return is_linear(weight) and (not lora.targets or role(weight) in lora.targets)


def scale(lora: Lora) -> float:
    """What B A x is multiplied by."""
    return lora.alpha / (lora.rank**0.5 if lora.rslora else lora.rank)


def adapters(spec: ModelSpec, lora: Lora) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter that the adapters add, by canonical name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in parameter_shapes(spec).items():
        if len(shape) == 2 and targets(lora, name):
            shapes |= _added(name.removesuffix(".weight"), shape, lora)
    return shapes


def _added(layer: str, shape: tuple[int, ...], lora: Lora) -> dict[str, tuple[int, ...]]:
    """What an adapter adds to the layer whose weight is [out, in]."""
    wide_out, wide_in = shape
    sizes: dict[str, tuple[int, ...]] = {f"{layer}.lora_m": (wide_out,)} if lora.dora else {}
    return sizes | {f"{layer}.lora_a.weight": (lora.rank, wide_in), f"{layer}.lora_b.weight": (wide_out, lora.rank)}


def check(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[Problem]:
    if plan.lora is None:
        return []
    problems, stacks = [], _stacks(spec)
    roles = list(dict.fromkeys(role(name) for name in parameter_shapes(spec) if is_linear(name)))
    for name in plan.lora.targets:
        if name not in roles:
            near = get_close_matches(name, roles, 1)
            fix = f"did you mean `{near[0]}`?" if near else f"all-linear, or some of {', '.join(roles)}"
            fix = ", ".join(stacks[name]) if name in stacks else fix
            problems.append(Problem("PLAN018", f"no linear layer has the role `{name}`", "lora.targets", fix))
    if plan.precision.modules:
        what = "adapters cannot be combined with precision.modules"
        problems.append(Problem("PLAN018", what, "precision.modules", "leave out precision.modules"))
    for stack in stacks.values():
        left = [name for name in stack if name not in plan.lora.targets]
        if 0 < len(left) < len(stack):
            what = f"{spec.family} stacks {', '.join(stack)} in one layer: target all of them or none"
            problems.append(Problem("PLAN018", what, "lora.targets", f"add {', '.join(left)}"))
    least = min(spec.hidden_size, spec.intermediate_size, spec.num_key_value_heads * spec.head_dim)
    if plan.lora.rank > least:
        what = f"rank {plan.lora.rank} exceeds the narrowest layer's {least}: an adapter would be larger than the layer"
        problems.append(Problem("PLAN018", what, "lora.rank", f"{min(16, least)}"))
    return problems


def _stacks(spec: ModelSpec) -> dict[str, list[str]]:
    """The layers that the family's files store as one: its name there (``qkv``), and the roles of the layers in it."""
    found: dict[str, list[str]] = {}
    for ours, theirs in () if spec.hf_model is not None else FAMILIES[spec.family].names.items():
        found.setdefault(theirs.rpartition(".")[2].removesuffix("_proj"), []).append(ours.rpartition(".")[2])
    return {name: roles for name, roles in found.items() if len(roles) > 1}


def cost(sheet: Sheet, plan: Plan) -> Sheet:
    """Every targeted product becomes the cell of its layer (cells.py)."""
    lora = plan.lora
    if lora is None:
        return sheet
    narrow = plan.precision.compute in ("bf16", "fp16")
    apart = narrow and not plan.sharded and plan.precision.weights != plan.precision.compute
    after = ("o", "down") if plan.layout.tp > 1 else ()  # their biases are added to the sum over the ranks

    plain, biased = (sheet.cells[name_of(lora, biased=biased, apart=apart)] for biased in (False, True))
    blocks = tuple(_adapted(block, lora, (plain, biased), after) for block in sheet.blocks)
    return dataclasses.replace(sheet, blocks=blocks)


@lru_cache(maxsize=KEPT_UNITS)
def _adapted(unit: Unit, lora: Lora, cells: tuple[Unit, Unit], after: tuple[str, ...]) -> Unit:
    """``cells``: of a layer without a bias and of one with; ``after``: layers whose biases are added later."""
    draft = Draft(unit)
    shapes = {
        weight.name: (int(weight.shape[0]), int(weight.shape[1]))
        for weight in unit.weights
        if weight.name.endswith(".weight") and targets(lora, f"layers.0.{weight.name}")
    }
    for index in range(len(draft.forward) - 1, -1, -1):
        module, _, own = draft.forward[index].weight.rpartition(".")  # a product with a bias has the bias's name
        if draft.forward[index].kind == "matmul" and f"{module}.weight" in shapes:
            wide_out, wide_in = shapes[f"{module}.weight"]
            cell = cells[own == "bias" and module.rpartition(".")[2] not in after]
            rows = nf4_rows_at_once(wide_out, wide_in)
            splice(draft, index, cell, module, {"in": wide_in, "out": wide_out, "r": lora.rank, "w": rows})
    return draft.done(_with_adapters(unit.weights, shapes, lora))


def _with_adapters(weights: tuple[Tensor, ...], shapes: dict[str, tuple[int, int]], lora: Lora) -> Iterator[Tensor]:
    """An adapter stands behind all that is its layer's own, as the modules list their parameters."""
    for weight, after in zip_longest(weights, weights[1:]):
        yield weight
        module = weight.name.rpartition(".")[0]
        if f"{module}.weight" in shapes and (after is None or after.name.rpartition(".")[0] != module):
            for name, shape in _added(module, shapes[f"{module}.weight"], lora).items():
                yield Tensor(name, shape, "weights", "weights")


def apply(parts: list[nn.Module], plan: Plan, meshes: Meshes) -> list[nn.Module]:
    """Gives each targeted layer two more, ``lora_a`` and ``lora_b``, whose product is added to what it returns. Its
    ``lora_share`` says what of the layer this rank has."""
    if plan.lora is None:
        return parts
    from torch import nn

    from shardwise.techniques.adapter import attach

    for part in parts:
        for name, module in list(part.named_modules()):
            if isinstance(module, nn.Linear) and targets(plan.lora, f"{name}.weight"):
                _HOOKS[module] = attach(module, plan.lora, scale(plan.lora))
    return parts


@contextmanager
def disabled(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Within it the model computes without its adapters."""
    layers = [module for part in parts for module in part.modules() if module in _HOOKS]
    for layer in layers:
        layer.lora_off = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer.lora_off = False  # type: ignore[assignment]


def detach(module: nn.Module) -> None:
    """Remove a layer's adapter (after its product was added to the layer's weight, for example)."""
    _HOOKS.pop(module).remove()
    del module.lora_a, module.lora_b
    if "lora_m" in dict(module.named_parameters(recurse=False)):
        del module.lora_m
