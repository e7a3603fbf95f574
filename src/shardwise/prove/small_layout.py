"""The layout of a plan with fewer ranks: the same axes, and experts that ranks share or do not as before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwise.spec.layout import MESH, Axis, Layout

Raised = Mapping[Axis, int]
"""Along these axes there are so many ranks, where the layout has them."""


def small_layout(layout: Layout, most: int, raised: Raised) -> Layout:
    """Return the layout with at most so many ranks along each axis."""
    degrees = {axis: min(raised.get(axis, most), layout.degree(axis)) for axis in MESH}
    exchanging = min(raised.get("ulysses", most), layout.ulysses)
    few = Layout(**degrees, ep=min(raised.get("ep", most), layout.ep), v_shaped=layout.v_shaped, ulysses=exchanging)
    nested = 1 < layout.ulysses < layout.cp
    ring = min(raised.get("ring", 2 if nested else most), layout.ring)
    few = replace(few, cp=ring * exchanging)
    few = _shared(few, layout) if layout.ep > 1 else few
    return replace(few, ranks_per_node=few.world)


def _shared(few: Layout, layout: Layout) -> Layout:
    """``few`` with ranks of a replica that have the same experts where ``layout`` has such, else with none: of fewer
    ranks all may be one group of ``ep``, or several."""
    ranks, same = few.fsdp * few.tp, layout.degree("expert_fsdp") > 1
    if not same:
        return replace(few, ep=ranks)
    if ranks > few.ep:
        return few
    if few.dp_shard > 1:
        return replace(few, dp_shard=2 * few.dp_shard)
    if few.tp > 1:
        return replace(few, tp=2 * few.tp)
    return replace(few, cp=2 * few.cp, ulysses=few.ulysses * (2 if few.ring == 1 else 1))
