"""Data types of compute, weights and reduction.

Shards nothing and sends nothing: it decides how wide everything else is. Weights (and both moments) are kept in
``weights``, fp32 unless the recipe says otherwise; forward and backward run in ``compute``; gradients travel and are
summed in ``reduce``. bf16 halves activations and gathers and pays on every device with bf16 matrix units; fp16 needs
loss scaling (runtime/step.py). Under a sharded strategy FSDP2 casts when it gathers (shard.py passes it the types);
otherwise each layer casts its weight at use, and the copies live until its backward has run.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from shardwise.errors import Problem
from shardwise.models.config import ModelSpec
from shardwise.spec.cluster import Cluster
from shardwise.spec.plan import Plan
from shardwise.spec.sheet import Sheet, Tensor, Unit
from shardwise.techniques.numbers import compute_type, torch_type

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


def check(spec: ModelSpec, plan: Plan, cluster: Cluster) -> list[Problem]:
    precision = plan.precision
    problems = []
    if precision.compute == "fp16" and precision.weights == "fp16":
        problems.append(
            Problem(
                "PLAN012",
                "fp16 weights lose most updates: their steps are below fp16's resolution",
                "precision.weights",
                "fp32 (or bf16)",
            )
        )
    if precision.weights == "bf16" and precision.compute == "fp32":
        problems.append(
            Problem(
                "PLAN012",
                "compute fp32 from weights kept in bf16 costs twice the time for none of the accuracy",
                "precision.compute",
                "bf16, or weights fp32",
            )
        )
    if precision.reduce == "bf16" and precision.compute == "fp64":
        problems.append(Problem("PLAN012", "gradients of fp64 would be reduced in bf16", "precision.reduce", "fp64"))
    return problems


def cost(sheet: Sheet, plan: Plan) -> Sheet:
    """Every tensor of the types ``weights`` and ``compute`` gets its real one."""
    real = {"weights": plan.precision.weights, "compute": plan.precision.compute}
    real["statistics"] = "fp64" if plan.precision.compute == "fp64" else "fp32"

    def typed(tensor: Tensor) -> Tensor:
        used_as = real.get(tensor.used_as, tensor.used_as)
        return dataclasses.replace(tensor, dtype=real.get(tensor.dtype, tensor.dtype), used_as=used_as)

    def rewritten(unit: Unit) -> Unit:
        return dataclasses.replace(
            unit, weights=tuple(map(typed, unit.weights)), tensors=tuple(map(typed, unit.tensors))
        )

    return sheet.rewritten(rewritten)


def apply(parts: list[nn.Module], plan: Plan, mesh: DeviceMesh | None) -> list[nn.Module]:
    """Sets the type of the weights; without FSDP2, makes linear and embedding layers cast theirs at use."""
    from torch import nn

    weights = torch_type(plan.precision.weights)
    for part in parts:
        if any(parameter.dtype != weights for parameter in part.parameters()):
            part.to(weights)
        if plan.shard.strategy != "ddp":
            continue
        for name, module in part.named_modules():
            number = compute_type(plan.precision, name)
            if number != plan.precision.weights and isinstance(module, (nn.Linear, nn.Embedding)):
                _cast_at_use(module, torch_type(number), torch_type(plan.precision.compute))
    return parts


def _cast_at_use(module: nn.Module, inside: torch.dtype, outside: torch.dtype) -> None:
    from torch import nn
    from torch.nn import functional

    if isinstance(module, nn.Embedding):
        # Looking up first and casting the rows gives the same numbers as casting the table, for less.
        module.forward = lambda ids: functional.embedding(ids, module.weight).to(outside)  # type: ignore[method-assign, assignment]
        return
    assert isinstance(module, nn.Linear)

    def forward(x: torch.Tensor) -> torch.Tensor:
        bias = None if module.bias is None else module.bias.to(inside)
        return functional.linear(x.to(inside), module.weight.to(inside), bias).to(outside)

    module.forward = forward  # type: ignore[method-assign, assignment]
