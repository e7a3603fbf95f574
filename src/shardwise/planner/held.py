"""The part of a unit's forward pass that runs again for its backward, and what of it nothing frees."""

from __future__ import annotations

from functools import lru_cache

from shardwise.spec.sheet import KEPT_UNITS, Op, Unit


@lru_cache(maxsize=8 * KEPT_UNITS)
def recomputed(unit: Unit) -> tuple[Op, ...]:
    """The operations that recomputation goes through: to the last that makes some of what backward reads, or short of
    the last that keeps its weight for backward."""
    read = {op.weight for op in unit.backward if op.kind == "matmul"} - {""}
    stops = [i + 1 for i, op in enumerate(unit.forward) if any(t in unit.saved for t in op.allocates)]
    stops += [i for i, op in enumerate(unit.forward) if op.kind == "matmul" and op.weight in read]
    stop = max(stops, default=0)
    in_place = [op.kind == "elementwise" and not op.allocates for op in unit.forward]
    while 0 < stop < len(in_place) and in_place[stop]:
        stop += 1  # it belongs to what was made before it
    return unit.forward[:stop]


def unfreed(unit: Unit) -> set[int]:
    """Return what the forward pass of a unit makes and none of its operations frees, short of its output."""
    freed = {tensor for op in (*unit.forward, *unit.backward) for tensor in op.frees}
    return {tensor for op in unit.forward for tensor in op.allocates} - freed - {unit.output}
