"""A technique that sends: between blocks each rank of a tensor-parallel group keeps its own tokens of the stream.

Without sequence parallelism all of them hold the whole stream. Here what leaves the embedding and every block but stays
with its rank is b*s/ranks tokens of it, a reduce-scatter of equal copies; the next block, and the last norm, gather
them. In backward each sends what the other does in forward, and gradients are summed over the ranks. Blocks compute as
before. It pays where the inputs that recomputation keeps are what memory is short of, and the wire is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from shardwise.distributed.collectives import enter, leave
from shardwise.distributed.meshes import Meshes
from shardwise.errors import Problem
from shardwise.models.blocks import blocks
from shardwise.models.config import ModelSpec
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.recipe import Recipe
from shardwise.techniques.variant import Traced

SETTINGS = {"spread": False}
INSIDE = (__file__, "distributed/collectives.py")


class RecipeWithSpread(Recipe):
    """What would be one line of spec/recipe.py."""

    spread: Literal["auto"] | bool = "auto"


@dataclass(frozen=True)
class PlanWithSpread(Plan):
    """What would be one line of spec/plan.py."""

    spread: bool = False


def choices(
    recipe: RecipeWithSpread, spec: ModelSpec, cluster: Cluster, plan: PlanWithSpread
) -> Iterator[PlanWithSpread]:
    """The pin; else the whole stream, then a rank's own tokens."""
    asked = recipe.spread
    if asked != "auto":
        yield replace(plan, spread=asked, why={**plan.why, "spread": "pinned"})
        return
    yield plan
    if plan.layout.tp > 1 and not plan.sequence_parallel:
        yield replace(plan, spread=True, why={**plan.why, "spread": "derived: the whole stream does not fit"})


def pins(recipe: RecipeWithSpread, plan: PlanWithSpread) -> dict[str, tuple[object, object]]:
    return {"spread": (plan.spread, recipe.spread)}


def check(spec: ModelSpec, plan: PlanWithSpread, cluster: Cluster) -> list[Problem]:
    if not plan.spread:
        return []
    ranks, tokens = plan.layout.tp, plan.batch.micro_batch_size * plan.batch.seq_len
    if ranks == 1 or plan.sequence_parallel:
        what = "there is no stream that several ranks hold whole"
        return [Problem("PLAN017", what, "spread", "`parallel.tp` above 1 with `parallel.sequence_parallel=false`")]
    if tokens % ranks:
        what = f"{ranks} ranks do not divide the {tokens} tokens of a micro-batch"
        return [Problem("PLAN017", what, "spread", "a `train.seq_len` that they divide")]
    return []


def traced(made: Traced, spec: ModelSpec, plan: PlanWithSpread, rank_kind: RankKind) -> Traced:
    tokens = plan.batch.micro_batch_size * plan.batch.seq_len
    return made.spread(tokens, plan.layout.tp, made.variant.plan.layout.tp).applied(spread=True)


def apply(parts: list[nn.Module], plan: PlanWithSpread, meshes: Meshes) -> list[nn.Module]:
    """Before recomputation, which then keeps a rank's own tokens and gathers them again."""
    group, ranks, shape = meshes.groups["tp"], meshes.size("tp"), list[int]()

    def own(whole: Tensor) -> Tensor:
        shape[:] = whole.shape[:-1]
        return leave(whole / ranks, group, cut=True)

    def whole(own: Tensor) -> Tensor:
        return enter(own, group, tuple(shape))

    def between(block: Callable[..., Tensor], hidden: Tensor, *more: Any) -> Tensor:
        return own(block(whole(hidden), *more))

    for part in parts:
        for block in blocks(part):
            block.forward = partial(between, block.forward)
        part.get_submodule("embed").register_forward_hook(lambda module, args, out: own(out))
        part.get_submodule("norm").register_forward_pre_hook(lambda module, args: whole(args[0]))
    return parts
