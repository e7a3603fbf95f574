"""Weights that the device has in the dtype of compute, since the host has those that are updated: the one fact of both.

Where the optimizer of a block is on the host, its fp32 weights are there, and are what is filled, saved and exported.
The device only computes with them, in bf16 or fp16, so that it holds rounded ones, half as large, and half as much
comes back after each update. Their gradients stay in fp32. Under a sharded strategy, which gathers all weights of a
block in the dtype of compute, it holds for all of them; else for the matrices of linear layers and experts, which cast
them whole.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from shardwise.distributed.torch_private import sum_gradients_in
from shardwise.models.roles import is_adaptable
from shardwise.spec.plan import Dtype, Plan
from shardwise.spec.sheet import KEPT_UNITS, Op, Unit
from shardwise.techniques.dtypes import torch_dtype
from shardwise.techniques.states import frozen

if TYPE_CHECKING:
    from torch import nn

CAST = "aten._to_copy"


def narrows(plan: Plan) -> bool:
    """Return whether any weight is narrow. Those that come to the device block by block are not, nor adapters, which
    are small, nor any where modules compute in dtypes of their own."""
    types, outside = plan.precision, plan.offload
    wide = types.weights == "fp32" and types.compute in ("bf16", "fp16") and not types.modules
    return wide and plan.lora is None and outside.optimizer != "none" and outside.weights == "none"


def narrow(plan: Plan, name: str, dims: int) -> bool:
    """Return whether the parameter with this canonical name and so many dims is narrow."""
    if not narrows(plan) or not name.startswith("layers.") or frozen(name, plan):
        return False
    return plan.offload.moves(int(name.split(".")[1])) and _cast_whole(name, dims, sharded=plan.sharded)


def _cast_whole(name: str, dims: int, *, sharded: bool) -> bool:
    """Return whether all that reads a weight of a block reads it in the dtype of compute."""
    return dims > 0 if sharded else dims > 1 and is_adaptable(name)


def store_narrow(parts: list[nn.Module], plan: Plan) -> None:
    """Set the dtype of narrow weights, before they have memory."""
    for part in parts if narrows(plan) else ():
        for name, parameter in part.named_parameters():
            if narrow(plan, name, parameter.ndim):
                parameter.data = parameter.data.to(torch_dtype(plan.precision.compute))


def keep_gradients(part: nn.Module, plan: Plan) -> None:
    """Have gradients of a part's narrow weights, which have memory by now, come in the dtype of
    ``precision.weights``."""
    if not narrows(plan):
        return
    wide = torch_dtype(plan.precision.weights)
    for parameter in part.parameters():
        if parameter.requires_grad and parameter.dtype != wide:
            parameter.grad_dtype = wide
    if plan.sharded:
        sum_gradients_in(part, wide)


@lru_cache(maxsize=8 * KEPT_UNITS)
def narrowed(block: Unit, compute: Dtype, *, sharded: bool) -> Unit:
    """Return a block on paper with its trained weights in the dtype of compute. FSDP2 gives them out in that dtype
    anyhow; else layers have nothing to cast in forward."""
    trained = {weight.name: len(weight.shape) for weight in block.weights if weight.trained}
    names = {name for name, dims in trained.items() if _cast_whole(f"layers.0.{name}", dims, sharded=sharded)}
    weights = tuple(one.typed(compute, compute) if one.name in names else one for one in block.weights)
    if sharded:
        return replace(block, weights=weights)
    casts = [i for i, op in enumerate(block.forward) if op.name == CAST and op.weight in names]
    copies = {tensor: block.forward[i].weight for i in casts for tensor in block.forward[i].allocates}
    return replace(
        block,
        weights=weights,
        forward=_without(block.forward, copies),
        forward_plain=_without(block.forward_plain, copies),
        backward=_without(block.backward, copies),
        saved=block.saved - copies.keys(),
        saved_ops=frozenset(i - sum(cast < i for cast in casts) for i in block.saved_ops),
    )


def _without(ops: tuple[Op, ...], copies: dict[int, str]) -> tuple[Op, ...]:
    """Return the operations but those that make copies of weights: what reads a copy reads the weight."""
    found = list[Op]()
    for op in ops:
        frees = tuple(tensor for tensor in op.frees if tensor not in copies)
        if not copies.keys().isdisjoint(op.allocates):
            if frees:
                found[-1] = found[-1].freeing(found[-1].frees + frees)
            continue
        if read := [copies[tensor] for tensor in op.reads if tensor in copies]:
            reads = tuple(tensor for tensor in op.reads if tensor not in copies)
            op = replace(op, reads=reads, weight=op.weight or read[0])
        found.append(op if frees == op.frees else op.freeing(frees))
    return tuple(found)
