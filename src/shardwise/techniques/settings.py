"""The settings in which plans differ: which of them units do not depend on, which of two plans is simpler, and what a
search has looked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from shardwise.spec.layout import Axis, Layout
from shardwise.spec.pipelines import PIPELINES
from shardwise.spec.plan import Batch, Estimate, Offload, Optim, Pipeline, Plan, Remat, Shard
from shardwise.spec.recipe import Recipe
from shardwise.techniques.cp import KINDS as CP_KINDS
from shardwise.techniques.remat import MODES
from shardwise.techniques.shard import degrees

SCHEDULES = sorted(PIPELINES, key=lambda name: PIPELINES[name].alive is None)
"""Schedules, simpler ones first, and last what has all micro-batches alive."""
AXES: tuple[Axis, ...] = ("tp", "pp", "cp", "ep")


def inside(plan: Plan) -> Plan:
    """The plan without all that units do not depend on: those of plans for which it is the same are the same."""
    batch, given = plan.batch, plan.layout
    shards = (2 if plan.sharded else 1) * given.ep
    layout = Layout(dp_shard=shards, cp=given.cp, tp=given.tp, ep=given.ep, ulysses=given.ulysses)
    types = replace(plan.precision, reduce="fp32", matmul="highest", gather="compute")
    return replace(
        plan,
        layout=layout,
        batch=Batch(batch.micro_batch_size, 1, batch.seq_len),
        shard=Shard("zero3" if plan.sharded else "ddp"),
        pipeline=Pipeline(),
        precision=types,
        remat=Remat(),
        compile=False,
        deterministic=False,
        attention="auto",
        expert_imbalance=1.0,
        optim=Optim(),
        offload=Offload(),
        loss="cross_entropy",
        entropy=False,
        estimate=Estimate(),
        why={},
        model="",
        cluster="",
    )


def simplicity(plan: Plan) -> tuple[object, ...]:
    """Return what orders plans, simpler ones first."""
    piped = plan.layout.pp, SCHEDULES.index(plan.pipeline.schedule), plan.pipeline.stages_per_rank
    inside = plan.layout.tp, plan.layout.cp, CP_KINDS.index(plan.cp_kind), plan.layout.ep
    pieces = recomputation(plan), -plan.batch.micro_batch_size
    return plan.offload.optimizer != "none", *piped, *inside, *degrees.simplicity(plan), *pieces


def recomputation(plan: Plan) -> float:
    """Return how much a plan computes again, from 0 on: with a budget the less, the more results it saves."""
    saved = sum(one.eighths for one in plan.remat.saved) / 8
    return MODES.index(plan.remat.mode) + (1 / (1 + saved) if plan.remat.mode == "budget" else 0)


def searched(recipe: Recipe, best: Plan) -> dict[str, Callable[[Plan], bool]]:
    """Return, by the key of each setting that was searched and acts in the best plan, whether another is as that."""
    asked, outside = recipe.parallel, recipe.offload
    had: dict[str, Callable[[Plan], bool]] = {
        f"layout.{axis}": partial(_split, axis) for axis in AXES if _split(axis, best) and not vars(asked)[axis]
    }
    if best.layout.cp > 1 and asked.cp_kind == "auto":
        had["cp_kind"] = lambda plan: plan.layout.cp != best.layout.cp or plan.cp_kind == best.cp_kind
    if best.offload.optimizer != "none" and outside.optimizer == "auto":
        had["offload.optimizer"] = lambda plan: plan.offload.optimizer != "none"
        if best.offload.optimizer_fraction < 1 and outside.optimizer_fraction is None:
            fraction = best.offload.optimizer_fraction
            had["offload.optimizer_fraction"] = lambda plan: plan.offload.optimizer_fraction == fraction
    if best.offload.sums == "host":
        had["offload.sums"] = lambda plan: plan.offload.sums == "host"
    if recomputation(best) and recipe.recompute.mode == "auto":
        had["remat.mode"] = lambda plan: not _recomputes_less(plan, best)
    return had


def _split(axis: Axis, plan: Plan) -> bool:
    return plan.layout.degree(axis) > 1


def _recomputes_less(plan: Plan, other: Plan) -> bool:
    """Return whether it is the same split, and computes less again."""
    same = plan.layout == other.layout and plan.shard == other.shard and plan.pipeline == other.pipeline
    return same and plan.offload.optimizer == other.offload.optimizer and recomputation(plan) < recomputation(other)
