"""The order of the techniques, and the folds over it: ``cost`` in the planner, ``apply`` in the runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.errors import Problem
from shardwise.models.config import ModelSpec
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.sheet import Sheet
from shardwise.techniques import compile, freeze, lora, optim, precision, remat, shard

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

ORDER = (lora, precision, freeze, remat, compile, shard, optim)


def check(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[Problem]:
    """Everything that makes ``plan`` illegal for the model and the cluster."""
    return [problem for technique in ORDER for problem in technique.check(spec, plan, cluster)]


def cost(sheet: Sheet, plan: Plan) -> Sheet:
    """The effect of the whole plan on the model on paper."""
    for technique in ORDER:
        sheet = technique.cost(sheet, plan)
    return sheet


def apply(parts: list[nn.Module], plan: Plan, mesh: DeviceMesh | None) -> list[nn.Module]:
    """The effect of the whole plan on the model's parts. The optimizer is built later, on what this returns."""
    for technique in ORDER:
        parts = technique.apply(parts, plan, mesh)
    return parts
