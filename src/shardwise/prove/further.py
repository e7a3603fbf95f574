"""What a small plan with two ranks along each axis lacks for want of ranks: with more of them, where they are few, or a
second small plan with the ranks of one axis alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from shardwise.errors import ShardwiseError
from shardwise.models.config import ModelSpec
from shardwise.prove.shrink import Shrunk, shrink
from shardwise.spec.layout import Axis, Layout
from shardwise.spec.plan import Pipeline, Plan

IN_PLACE = 4
"""Up to so many ranks the small plan itself has; beyond, those of an axis are a case of their own."""
RAISED: tuple[tuple[Axis, ...], ...] = (
    ("tp",),
    ("ring",),
    ("ulysses",),
    ("dp_shard",),
    ("pp",),
    ("dp_shard", "dp_replicate"),
)
"""The first of them has more ranks than two, or as many."""
DEGREES = (2, 3, 4)


@dataclass(frozen=True)
class Cases:
    """The ``small`` plan, ``others`` that parity runs too, and of each path that none of them takes its name and
    why."""

    small: Shrunk
    others: tuple[Shrunk, ...] = ()
    lost: tuple[str, ...] = ()


def further(spec: ModelSpec, plan: Plan, small: Shrunk, most_ranks: int) -> Cases:
    """The cases that together take as many of the plan's paths as can be, each of at most so many ranks."""
    others, missing, tried, larger = list[Shrunk](), small.lost, 0, dict[str, int]()
    for in_place, (axes, degree) in product((True, False), product(RAISED, DEGREES)):
        axis, layout = axes[0], small.plan.layout
        if not missing:
            break
        if degree > plan.layout.degree(axis) or (len(axes) > 1 and (in_place or plan.layout.degree(axes[1]) == 1)):
            continue
        if in_place and not layout.degree(axis) < degree <= IN_PLACE * layout.degree(axis) / layout.world:
            continue
        try:
            whole = (spec, plan) if in_place else (spec, alone(plan, axes))
            found = shrink(*whole, 2, {axis: degree}, None if in_place else missing)
        except ShardwiseError:
            continue
        tried += 1
        world, fewer = found.plan.layout.world, found.lost < missing
        if fewer and world > most_ranks:
            larger |= {name: min(world, larger.get(name, world)) for name in missing - found.lost}
        elif fewer and in_place and world <= IN_PLACE:
            small, missing = found, found.lost
        elif fewer and not in_place:
            others, missing = [*others, found], found.lost
    return Cases(small, tuple(others), tuple(_words(sorted(missing), larger, most_ranks, tried)))


def _words(names: list[str], larger: dict[str, int], most_ranks: int, tried: int) -> Iterator[str]:
    for name in names:
        if name in larger:
            why = f"it takes {larger[name]} ranks, and this machine has the memory for {most_ranks}"
        else:
            why = f"none of {tried + 1} small layouts that were tried has it"
        yield f"what is computed where there is {name}: {why}"


def alone(plan: Plan, axes: tuple[Axis, ...]) -> Plan:
    """``plan`` with one rank along all other axes."""
    layout, kind, axis = plan.layout, plan.cp_kind, axes[0]
    if axis == "ring":
        few, kind = Layout(cp=layout.ring), "gather" if kind == "gather" else "ring"
    elif axis == "ulysses":
        few, kind = Layout(cp=layout.ulysses, ulysses=layout.ulysses), "ulysses"
    else:
        few, kind = replace(Layout(), **{str(each): layout.degree(each) for each in axes}), "ring"  # type: ignore[arg-type]
    staged = axis == "pp"
    return replace(
        plan,
        layout=replace(few, v_shaped=layout.v_shaped and staged, ranks_per_node=few.world),
        cp_kind=kind,
        sequence_parallel=plan.sequence_parallel and axis == "tp",
        pipeline=plan.pipeline if staged else Pipeline(),
    )
