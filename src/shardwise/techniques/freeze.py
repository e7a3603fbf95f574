"""Frozen parameters: weights that stay as they are (``model.frozen``, globs over parameter names; under LoRA all but
the adapters and ``lora.modules_to_save``).

Shards and sends nothing: a frozen weight has no gradient, no moments and no part in any reduction; the product that
would give its gradient is skipped, and inputs that only this product reads are not saved. Backward stops where nothing
trained lies before it: with the embedding and the first blocks frozen whole, those save nothing. Frozen weights are
gathered, and saved in checkpoints, like the others. It pays when part of a model is to be adapted: of 16 bytes of state
per parameter, 12 are saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING

from shardwise.errors import Problem
from shardwise.models.blocks import canonical
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.roles import is_counted
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Lora, Plan
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.recipe import Recipe
from shardwise.spec.sheet import KEPT_UNITS, Sheet, Unit
from shardwise.techniques.states import adapted, frozen
from shardwise.techniques.variant import Traced, parameters

if TYPE_CHECKING:
    from torch import nn

    from shardwise.distributed.meshes import Meshes

SETTINGS = {"frozen": (), "lora": None}
INSIDE = ("techniques/freeze.py", "techniques/states.py")


def choices(recipe: Recipe, spec: ModelSpec, cluster: Cluster, plan: Plan) -> Iterator[Plan]:
    """Yield the plan with the frozen weights that the recipe names."""
    yield dataclasses.replace(plan, frozen=tuple(recipe.model.frozen))


def pins(recipe: Recipe, plan: Plan) -> dict[str, tuple[object, object]]:
    return {"frozen": (plan.frozen, tuple(recipe.model.frozen))}


def check(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[Problem]:
    if not plan.frozen:
        return []
    if plan.lora is not None:
        what = "with adapters, everything else is frozen"
        return [Problem("PLAN017", what, "model.frozen", "leave out model.frozen")]
    names, problems = list(parameter_shapes(spec)), []
    for pattern in plan.frozen:
        if not any(fnmatchcase(name, pattern) for name in names):
            what = f"`{pattern}` matches no parameter of {spec.name}"
            problems.append(Problem("PLAN017", what, "model.frozen", _nearest(pattern, spec, names)))
    if all(frozen(name, plan) for name in names):
        what = "every parameter is frozen: there is nothing to train"
        problems.append(
            Problem(
                "PLAN017",
                what,
                "model.frozen",
                "remove a pattern; one trained weight, such as `norm.weight`, is enough",
            )
        )
    elif plan.precision.modules and plan.sharded and plan.shard.strategy == "zero3" and frozen("embed.weight", plan):
        # Sharded modules with a type of their own are gathered apart; whether they are again depends on each input.
        what = "zero3 does not support a frozen embedding together with precision.modules"
        fix = "strategy zero2, zero1 or ddp; or leave out precision.modules"
        problems.append(Problem("PLAN017", what, "precision.modules", fix))
    return problems


def _nearest(pattern: str, spec: ModelSpec, names: list[str]) -> str:
    if spec.tie_word_embeddings and fnmatchcase("head.weight", pattern):
        return "`embed.*`: the output layer's weight is the embedding's"
    modules = {".".join(name.split(".")[:depth]) + ".*" for name in names for depth in range(1, name.count(".") + 1)}
    kinds = {f"*.{name.split('.', 2)[2].rpartition('.')[0]}.*" for name in names if name.startswith("layers.")}
    near = get_close_matches(pattern, [*names, *sorted(modules | kinds | {"*norm.weight", "*.mlp.*"})], 1)
    return f"did you mean `{near[0]}`?" if near else "a glob such as `embed.*`, `layers.0.*` or `*.mlp.*`"


def regimes(spec: ModelSpec, plan: Plan, trained: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """Blocks of which no backward is asked."""
    return {"blocks before the first trained weight": _first_trained(spec, plan.frozen, plan.lora) > 0}


def traced(made: Traced, spec: ModelSpec, plan: Plan, rank_kind: RankKind) -> Traced:
    """Tell which of the unit's weights are frozen, and whether anything before it is trained."""
    if made.variant.plan.lora is None:  # else all but the adapters
        made = made.applied(frozen=tuple(told for name, told in made.names(spec).items() if frozen(name, plan)))
    if made.unit == "embedding":
        return made
    first = _first_trained(spec, plan.frozen, plan.lora)
    here = made.unit if isinstance(made.unit, int) else spec.num_hidden_layers
    return made.told(input_trained=first < here)


@lru_cache(maxsize=KEPT_UNITS)
def _first_trained(spec: ModelSpec, patterns: tuple[str, ...], lora: Lora | None) -> int:
    """The first block with a trained weight, or an adapter; -1: something before the blocks is."""
    for unit in range(-1, spec.num_hidden_layers):
        names = parameters(spec, "embedding" if unit < 0 else f"layers.{unit}.")
        if lora is not None and any(adapted(name, lora) or lora.saves(name) for name in names):
            return unit
        held = (is_counted(name) or any(fnmatchcase(name, pattern) for pattern in patterns) for name in names)
        if lora is None and not all(held):
            return unit
    return spec.num_hidden_layers


def cost(sheet: Sheet, plan: Plan) -> Sheet:
    """Leave the rotation tables unsaved where no block's backward rotates."""
    if any(_rotates_back(block) for block in sheet.blocks):
        return sheet
    return dataclasses.replace(sheet, embedding=_without_tables(sheet.embedding))


@lru_cache(maxsize=KEPT_UNITS)
def _without_tables(embedding: Unit) -> Unit:
    return dataclasses.replace(embedding, saved=frozenset())


@lru_cache(maxsize=KEPT_UNITS)
def _rotates_back(block: Unit) -> bool:
    """Return whether the gradient of q or k is used, for which backward needs the rotation tables."""
    rotated = {tensor for op in block.backward if op.kind == "attention" for tensor in op.allocates[:2]}
    return any(not rotated.isdisjoint(op.reads) for op in block.backward)


def apply(parts: list[nn.Module], plan: Plan, meshes: Meshes) -> list[nn.Module]:
    from shardwise.models.decoder import Decoder

    for part in parts:
        for name, parameter in part.named_parameters():
            if frozen(canonical(part, name), plan):
                parameter.requires_grad_(False)
        if isinstance(part, Decoder) and part.input_trained:
            first = _first_trained(part.spec, plan.frozen, plan.lora)
            part.input_trained = first < min(part.numbers, default=part.spec.num_hidden_layers)
    return parts
