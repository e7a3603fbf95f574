"""Checks whether the attention kernel that a plan pins serves its model on its devices."""

from __future__ import annotations

from dataclasses import replace

from shardwise.errors import Problem
from shardwise.models import kernel_choice
from shardwise.models.config import ModelSpec
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan


def unserved(spec: ModelSpec, plan: Plan, cluster: Cluster) -> Problem | None:
    """Refuses a pinned attention kernel that can compute no layer, whether rows hold one document or several."""
    if plan.attention == "auto":
        return None
    device = cluster.device
    kind = cluster.kind if cluster.kind == "cpu" or device.capability else "rocm"
    case = kernel_choice.Case(kind, plan.precision.compute, spec.attention.head_dim, device.capability or (0, 0))
    case = replace(case, deterministic=plan.deterministic)
    asked = kernel_choice.cases(spec, case, plan.batch.seq_len).values()
    served = {row.name for row in kernel_choice.KERNELS for case in asked if row.serves(case)}
    if plan.attention in served:
        return None
    of = f"{plan.precision.compute} with heads of {spec.attention.head_dim} on {device.name}"
    what = f"`attention: {plan.attention}` serves no layer of {spec.name} in {of}"
    return Problem("PLAN020", what, "attention", f"attention=auto, or one of {', '.join(sorted(served))}")
