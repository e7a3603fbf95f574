"""The ways to split the devices of a cluster among the axes, given what a recipe pins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwise.errors import ConfigError, Problem
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import Layout, divisors
from shardwise.spec.plan import Estimate, Plan, Shard, Strategy
from shardwise.spec.recipe import Recipe

STRATEGIES: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "zero3")
KINDS = (*STRATEGIES, "hybrid")
"""What plans are called that split no model, simpler ones first."""


def kind(plan: Plan) -> str:
    """Return which of ``KINDS`` a plan is of."""
    return "hybrid" if plan.shard.strategy != "ddp" and plan.layout.dp_replicate > 1 else plan.shard.strategy


def simplicity(plan: Plan) -> tuple[int, int]:
    """Return what orders plans: one group of slices before replicas of several, then the strategies."""
    return kind(plan) == "hybrid", STRATEGIES.index(plan.shard.strategy)


def words(plan: Plan) -> str:
    """``zero3 over 8 x 2``."""
    over = plan.layout.size("loss") if plan.shard.strategy == "ddp" else plan.layout.fsdp
    return f"{plan.shard.strategy} over {over}" + f" x {plan.layout.dp_replicate}" * (kind(plan) == "hybrid")


def twin(plan: Plan) -> Plan | None:
    """Return, of a plan with zero2 and one micro-batch, the same program with zero1, not priced; None of any other."""
    if plan.shard.strategy != "zero2" or plan.batch.accumulation > 1 or plan.layout.pp > 1:
        return None
    return replace(plan, shard=replace(plan.shard, strategy="zero1"), estimate=Estimate())


def smallest(plan: Plan) -> Plan:
    """Return the plan with the strategy that holds least."""
    return replace(plan, shard=Shard("zero3" if plan.layout.dp > 1 else "ddp"))


def beside_stages(asked: str, plans: list[Plan]) -> list[Plan]:
    """Return those of the plans of a pipeline that are tried where the recipe pins none. Where the strategy is open, of
    what is cut it has zero1, which reduces once, and zero3, which holds least, over all ranks of a stage: stages have
    made weights small, and lie on few nodes."""
    if asked == "hsdp":
        return [plan for plan in plans if plan.layout.dp_replicate > 1]
    if asked != "auto":
        return plans
    whole = (plan for plan in plans if 1 in (plan.layout.dp_shard, plan.layout.dp_replicate))
    return [plan for plan in whole if plan.shard.strategy != "zero2"]


def streams(plan: Plan) -> int:
    """Return how many streams allocate: the one that computes; under FSDP2 those in which it gathers and reduces, and
    of a hybrid plan sums over replicas."""
    return 1 if not plan.sharded else 4 if plan.layout.dp_replicate > 1 else 3


def sent_over(plan: Plan) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], bool]:
    """Return the groups over which weights are gathered, and those over which gradients are summed, or matrices
    gathered, alone; and whether part of the ranks gather them again, from what is kept after forward."""
    gathered, summed = (("fsdp", "expert_fsdp"), ("dp_replicate",)) if plan.sharded else ((), ("loss", "expert_loss"))
    over = gathered, (*summed, *(("stage", "expert_loss") if plan.optim.spec.rest else ()))
    return over, plan.shard.strategy == "zero3" and not isinstance(plan.shard.reshard_after_forward, bool)


def grouped(cluster: Cluster, plan: Plan) -> Cluster:
    """The cluster as data parallelism sees it: each group of devices that read the same rows counts as one device, and
    there are as many in each stage of a pipeline, which follow one another."""
    layout, pp = plan.layout, plan.layout.pp
    tp = layout.tp * layout.cp
    if cluster.world % (tp * pp):
        legal = ", ".join(map(str, divisors(cluster.world)))
        degrees = {axis: size for axis in ("pp", "cp", "tp") if (size := layout.degree(axis)) > 1}
        what = " x ".join(f"{axis} {size}" for axis, size in degrees.items())
        what += f" does not divide the {cluster.world} devices that are used"
        one = "one of " if len(degrees) == 1 else "a product of "
        raise ConfigError(Problem("PLAN001", what, f"parallel.{next(iter(degrees))}", f"{one}{legal}"))
    nodes, each = cluster.nodes, cluster.devices_per_node
    if pp > 1:
        nodes, each = (nodes // pp, each) if nodes % pp == 0 else (1, cluster.world // pp)
    if each % tp:  # across nodes
        return replace(cluster, nodes=nodes * each // tp, devices_per_node=1)
    return replace(cluster, nodes=nodes, devices_per_node=each // tp)


def layouts(recipe: Recipe, cluster: Cluster, cp: int, *, pinned: bool) -> Iterator[tuple[Strategy, Layout]]:
    """The data-parallel strategies in the order in which they are tried; with ``pinned``, those the recipe allows.
    ``cp``: ranks with tokens of the same rows, over which weights may be cut too."""
    asked, parallel = recipe.parallel.strategy, recipe.parallel
    world, per_node = cluster.world, cluster.devices_per_node
    replicated = Layout(dp_replicate=world, ranks_per_node=per_node)
    shard, replicas = parallel.dp_shard, parallel.dp_replicate
    if world % ((shard or 1) * (replicas or 1)) or (shard and replicas and shard * replicas != world):
        raise ConfigError(_mesh(recipe, cluster))
    if world == 1:
        for strategy in STRATEGIES if cp > 1 else STRATEGIES[:1]:
            if cp == 1 or asked == "auto" or not pinned or strategy == (asked if asked in STRATEGIES else "zero3"):
                yield strategy, replicated
        return
    hybrid = (replicas or 1) > 1 or (shard or world) < world or (asked == "hsdp" and pinned)
    if (asked == "auto" and not hybrid and shard is None) or not pinned:
        for strategy in STRATEGIES:
            yield strategy, replicated if strategy == "ddp" else Layout(dp_shard=world, ranks_per_node=per_node)
        if (cluster.nodes > 1 or hybrid) and 1 < _hybrid(recipe, cluster).dp_shard < world:
            for strategy in STRATEGIES[1:]:
                yield strategy, _hybrid(recipe, cluster)
    elif asked == "ddp" or (asked == "auto" and (shard == 1 or replicas == world)):
        if (shard or 1) > 1 or (replicas or world) != world:
            raise ConfigError(_mesh(recipe, cluster))
        yield "ddp", replicated
    else:
        layout = _hybrid(recipe, cluster) if hybrid else Layout(dp_shard=world, ranks_per_node=per_node)
        strategies: dict[str, tuple[Strategy, ...]] = {"auto": STRATEGIES[1:], "fsdp": ("zero3",), "hsdp": ("zero3",)}
        for strategy in strategies.get(asked) or tuple(s for s in STRATEGIES if s == asked):
            yield strategy, layout


def _hybrid(recipe: Recipe, cluster: Cluster) -> Layout:
    """Shards within a node and replicates across nodes, unless pinned otherwise."""
    parallel, world = recipe.parallel, cluster.world
    shard = parallel.dp_shard or (cluster.devices_per_node if cluster.nodes > 1 else 0)
    if parallel.dp_replicate and not parallel.dp_shard:
        shard = world // parallel.dp_replicate
    if shard == 0:
        shard = divisors(world)[1]
    replicate = parallel.dp_replicate or world // max(1, shard)
    if shard * replicate != world:
        raise ConfigError(_mesh(recipe, cluster))
    return Layout(dp_replicate=replicate, dp_shard=shard, ranks_per_node=cluster.devices_per_node)


def _mesh(recipe: Recipe, cluster: Cluster) -> Problem:
    parallel, world = recipe.parallel, cluster.world
    replicate, shard = parallel.dp_replicate or 1, parallel.dp_shard or 1
    legal = ", ".join(f"{world // n} x {n}" for n in divisors(world))
    fix = f"dp_replicate x dp_shard one of {legal}; or leave one of them out"
    if parallel.strategy == "ddp":
        fix = f"`parallel.dp_replicate={world}` and no dp_shard, or strategy zero1, zero2, zero3 or hsdp"
    what = f"dp_replicate {replicate} x dp_shard {shard} = {replicate * shard}, but {world} devices are used"
    return Problem("PLAN001", what, "parallel", fix)
