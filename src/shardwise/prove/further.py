"""The paths that a small plan with two ranks along each axis lacks for want of ranks: with more of them, where they
are few, or a second small plan with the ranks of one axis alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from shardwise.errors import ShardwiseError
from shardwise.models.config import ModelSpec
from shardwise.prove.shrink import Shrunk, shrink
from shardwise.spec.layout import Axis, Layout
from shardwise.spec.plan import Pipeline, Plan

IN_PLACE = 4
"""Up to so many ranks the small plan itself has; beyond, those of an axis are a case of their own."""
AXES: tuple[Axis, ...] = ("tp", "ring", "ulysses", "dp_shard", "pp")
"""That are raised; replicas are alike."""


def further(
    spec: ModelSpec, plan: Plan, small: Shrunk, most_ranks: int
) -> tuple[Shrunk, tuple[Shrunk, ...], tuple[str, ...]]:
    """The small plan, or one with more ranks, and others that together with it take as many of the plan's paths as can
    be, each of at most so many ranks; and of each path that none of them takes its name and why."""
    others = list[Shrunk]()
    missing = small.lost
    tried = 1
    for in_place, axis, degree in product((True, False), AXES, (2, 3, 4)):
        few = small.plan.layout
        fits = few.degree(axis) < degree <= IN_PLACE * few.degree(axis) / few.world or not in_place
        if not missing or degree > plan.layout.degree(axis) or not fits:
            continue
        whole = (spec, plan) if in_place else (spec, alone(plan, axis))
        try:
            found = shrink(*whole, 2, {axis: degree}, None if in_place else missing)
        except ShardwiseError:
            continue
        tried += 1
        if found.lost < missing and found.plan.layout.world <= (IN_PLACE if in_place else most_ranks):
            small, others, missing = (found, others, found.lost) if in_place else (small, [*others, found], found.lost)
    why = f"none of {tried} small layouts that were tried, of at most {most_ranks} ranks, has it"
    return small, tuple(others), tuple(f"what is computed where there is {name}: {why}" for name in sorted(missing))


def alone(plan: Plan, axis: Axis) -> Plan:
    """``plan`` with one rank along all other axes."""
    layout = plan.layout
    kind = plan.cp_kind if axis == "ring" else "ring"
    staged = axis == "pp"
    few = {axis: layout.degree(axis)}
    if axis in ("ring", "ulysses"):
        few = {"cp": layout.degree(axis), "ulysses": layout.ulysses if axis == "ulysses" else 1}
        kind = "ulysses" if axis == "ulysses" else "gather" if kind == "gather" else "ring"
    made = replace(
        plan,
        layout=Layout(**few, v_shaped=layout.v_shaped and staged),
        cp_kind=kind,
        sequence_parallel=plan.sequence_parallel and axis == "tp",
        pipeline=plan.pipeline if staged else Pipeline(),
    )
    return made if made.sharded else replace(made, precision=replace(made.precision, gather="compute"))
