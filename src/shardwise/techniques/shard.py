"""One dial for data parallelism: what lives on a slice of the data-parallel ranks.

    strategy   on a slice                   sends a step, with m micro-batches and P bytes of weights
    ddp        nothing                      all-reduce of the gradients, once
    zero1      moments, masters             gathers P once; reduce-scatters once
    zero2      + gradients                  gathers P once; reduce-scatters m times
    zero3      + weights                    gathers P 2m times (the root m times); reduce-scatters m times

(fsdp is another name of zero3.) With dp_replicate > 1 a sharded strategy is hybrid (hsdp): slices over dp_shard ranks,
and one all-reduce of the slices over dp_replicate a step. Use the first that fits. Built on FSDP2's ``fully_shard``,
whose unit is a block; ddp on replicas.py. Gradients are sums, never means: the loss is already divided by the number
of supervised tokens of the whole step. FSDP2 takes the types of precision.py and so this file reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from shardwise.errors import Problem
from shardwise.models.config import ModelSpec
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.techniques.numbers import compute_type, torch_type
from shardwise.techniques.replicas import Replicas

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

_REPLICAS: WeakKeyDictionary[nn.Module, Replicas] = WeakKeyDictionary()


def units(part: nn.Module) -> list[nn.Module]:
    """The technique's one fact: what is gathered and reduced as one: each block, then the root with all the rest."""
    return [*part.layers, part]  # type: ignore[misc]


def check(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[Problem]:
    layout, problems = plan.layout, []
    if plan.shard.strategy == "ddp" and layout.dp_shard > 1:
        problems.append(
            Problem(
                "PLAN014",
                f"ddp shards nothing, but dp_shard is {layout.dp_shard}",
                "parallel.dp_shard",
                f"dp_replicate {layout.dp} and dp_shard 1, or strategy zero1, zero2 or zero3",
            )
        )
    if plan.shard.strategy != "ddp" and layout.dp_shard == 1 and layout.dp > 1:
        problems.append(
            Problem(
                "PLAN014",
                f"{plan.shard.strategy} shards over dp_shard ranks, but dp_shard is 1",
                "parallel.dp_shard",
                f"dp_shard {layout.dp}, or strategy ddp",
            )
        )
    k = plan.shard.reshard_after_forward
    if not isinstance(k, bool) and (plan.shard.strategy != "zero3" or k < 2 or layout.dp_shard % k or k == layout.dp_shard):
        divisors = [str(d) for d in range(2, layout.dp_shard) if layout.dp_shard % d == 0]
        problems.append(
            Problem(
                "PLAN015",
                f"reshard_after_forward {k} with {plan.shard.strategy} over {layout.dp_shard} ranks",
                "parallel.reshard_after_forward",
                f"strategy zero3 with {', '.join(divisors) or 'true or false'}",
            )
        )
    return problems


def apply(parts: list[nn.Module], plan: Plan, mesh: DeviceMesh | None) -> list[nn.Module]:
    if mesh is None or plan.layout.dp == 1:
        return parts
    for part in parts:
        if plan.shard.strategy == "ddp":
            wire = torch_type(plan.precision.reduce)
            _REPLICAS[part] = Replicas(part, mesh.get_group("dp_replicate"), plan.shard.bucket_bytes, wire)
        else:
            _fully_shard(part, plan, mesh)
    return parts


def _fully_shard(part: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    hybrid = plan.layout.dp_replicate > 1
    dp_mesh = mesh["dp_replicate", "dp_shard"] if hybrid else mesh["dp_shard"]
    reshard = plan.shard.reshard_after_forward if plan.shard.strategy == "zero3" else False
    reduce = torch_type(plan.precision.reduce)
    policy = MixedPrecisionPolicy(param_dtype=torch_type(plan.precision.compute), reduce_dtype=reduce)
    outside = policy.param_dtype
    for name, module in part.named_modules():
        number = compute_type(plan.precision, name)
        if number != plan.precision.compute and next(module.parameters(recurse=False), None) is not None:
            own = MixedPrecisionPolicy(torch_type(number), reduce, output_dtype=outside)
            fully_shard(module, mesh=dp_mesh, mp_policy=own, reshard_after_forward=reshard)
    for unit in units(part):
        # None lets FSDP2 keep the root, whose weights backward needs first.
        fully_shard(unit, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=None if unit is part and reshard else reshard)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            # gloo knows no other way to a sum, and elsewhere a mean would be divided twice.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def synchronise(parts: Sequence[nn.Module], plan: Plan, *, last: bool) -> None:
    """Before each micro-batch: says whether it is the ``last`` of its step, which decides what it sends and frees."""
    from torch.distributed.fsdp import FSDPModule

    for part in parts:
        if part in _REPLICAS:
            _REPLICAS[part].active = last
        elif isinstance(part, FSDPModule):
            part.set_is_last_backward(last)
            part.set_requires_all_reduce(last)
            if plan.shard.strategy == "zero1":
                part.set_requires_gradient_sync(last)
            if plan.shard.strategy != "zero3":
                part.set_reshard_after_backward(last)


def finish(parts: Sequence[nn.Module]) -> None:
    """After the last backward of a step: gradients are summed when this returns."""
    for part in parts:
        if part in _REPLICAS:
            _REPLICAS[part].finish()


def replication(plan: Plan) -> int:
    """How many ranks hold the same element of a weight, gradient or moment."""
    return plan.layout.dp if plan.shard.strategy == "ddp" else plan.layout.dp_replicate
