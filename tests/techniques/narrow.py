"""A whole technique, as CONTRIBUTING.md says to write one: frozen weights are kept in the dtype that is computed in.

Shards and sends nothing; a gathered or replicated weight needs no cast. It pays where part of a model is frozen and its
memory is short: computed in bf16, a frozen weight takes 2 bytes for 4, and every result is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from shardwise.distributed.meshes import Meshes
from shardwise.errors import Problem
from shardwise.models.config import ModelSpec
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.recipe import Recipe
from shardwise.spec.sheet import Sheet, Tensor, Unit
from shardwise.techniques.dtypes import torch_dtype
from shardwise.techniques.variant import Traced

SETTINGS = {"narrow": False}
INSIDE = (__file__,)
"""It decides in which dtype a unit's weights come; in the package, ``techniques/narrow.py``."""


class RecipeWithNarrow(Recipe):
    """What would be one line of spec/recipe.py."""

    narrow: Literal["auto"] | bool = "auto"


@dataclass(frozen=True)
class PlanWithNarrow(Plan):
    """What would be one line of spec/plan.py."""

    narrow: bool = False


def kept_in(dtype: str, used_as: str, *, trained: bool) -> str:
    """The technique's one fact: the dtype in which a weight is kept."""
    return dtype if trained else used_as


def choices(
    recipe: RecipeWithNarrow, spec: ModelSpec, cluster: Cluster, plan: PlanWithNarrow
) -> Iterator[PlanWithNarrow]:
    """The pin; else frozen weights as they are, then narrow."""
    asked = recipe.narrow
    if asked != "auto":
        yield replace(plan, narrow=asked, why={**plan.why, "narrow": "pinned"})
        return
    yield replace(plan, narrow=False)
    if plan.frozen:
        why = {**plan.why, "narrow": "derived: frozen weights as they are do not fit"}
        yield replace(plan, narrow=True, why=why)


def pins(recipe: RecipeWithNarrow, plan: PlanWithNarrow) -> dict[str, tuple[object, object]]:
    return {"narrow": (plan.narrow, recipe.narrow)}


def check(spec: ModelSpec, plan: PlanWithNarrow, cluster: Cluster) -> list[Problem]:
    if plan.narrow and not plan.frozen:
        what = "no weight is frozen, and the others must be kept as they are"
        return [Problem("PLAN017", what, "narrow", "`model.frozen`, or leave it out")]
    return []


NO_REGIMES = "a weight's dtype does not depend on its size"


def traced(made: Traced, spec: ModelSpec, plan: PlanWithNarrow, rank_kind: RankKind) -> Traced:
    """Where nothing is gathered, a layer casts the weight that it is given."""
    return made if plan.sharded else made.applied(narrow=True)


def cost(sheet: Sheet, plan: PlanWithNarrow) -> Sheet:
    """After freeze, which says what is trained, and precision, which says what is computed in."""

    def kept(weight: Tensor) -> Tensor:
        dtype = kept_in(weight.dtype, weight.used_as, trained=weight.trained)
        return weight.typed(dtype, weight.used_as)

    def rewritten(unit: Unit) -> Unit:
        return replace(unit, weights=tuple(map(kept, unit.weights)))

    return sheet.rewritten(rewritten)


def apply(parts: list[nn.Module], plan: PlanWithNarrow, meshes: Meshes) -> list[nn.Module]:
    for parameter in (parameter for part in parts for parameter in part.parameters()):
        dtype = kept_in(plan.precision.weights, plan.precision.compute, trained=parameter.requires_grad)
        parameter.data = parameter.data.to(torch_dtype(dtype))
    return parts
