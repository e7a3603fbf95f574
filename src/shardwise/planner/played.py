"""How many micro-batches of a step are played, where all others are like one of them."""

from __future__ import annotations

from shardwise.spec.plan import Plan

FEW = 3
"""Micro-batches that are played of more: the first, one that is like most, and the last."""


def enough(plan: Plan) -> int:
    """Return of how many of its micro-batches a step's peak is that of all: of a pipeline, some rounds of its ranks."""
    m, ranks = plan.batch.accumulation, plan.layout.pp
    if ranks == 1:
        return min(m, FEW)
    few = 2 * ranks * plan.pipeline.stages_per_rank
    return m if plan.pipeline.spec.alive is None or m <= few + ranks or m % ranks else few
