"""The product that an adapter adds to a layer: ``targets`` beside it says to which layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.distributed.slices import local
from shardwise.models.layers import accumulation_dtype
from shardwise.models.moe import Stacked
from shardwise.spec.plan import Lora
from shardwise.techniques.lora.dora import row_norms
from shardwise.techniques.lora.dropout import dropped
from shardwise.techniques.lora.joint import joins, joint
from shardwise.techniques.share import WHOLE, LayerShare

Norms = Callable[[nn.Module, float, LayerShare], torch.Tensor]


def attach(module: nn.Linear | Stacked, lora: Lora, factor: float, norms_of: Norms = row_norms) -> RemovableHandle:
    """Give the layer its adapter, by whose handle it can be removed; ``factor`` is what B A x is multiplied by. Of a
    matrix of experts each has an adapter of its own: A [E*r,k], B [E*n,r]."""
    like: dict[str, Any] = {"device": module.weight.device, "dtype": module.weight.dtype}
    if lora.dora:
        module.lora_m = nn.Parameter(torch.empty(module.weight.shape[0], **like))
    down: nn.Module
    up: nn.Module
    if isinstance(module, Stacked):
        down = Stacked(module.experts, lora.rank, module.columns, **like)
        up = Stacked(module.experts, module.rows, lora.rank, **like)
    else:
        down = nn.Linear(module.in_features, lora.rank, bias=False, **like)
        up = nn.Linear(lora.rank, module.out_features, bias=False, **like)
    module.lora_a, module.lora_b = down, up

    def add(module: Any, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        x, *counts = args
        if torch.compiler.is_compiling() and joins(module) and not lora.dora and not lora.dropout:
            return joint(x, module.weight, down.weight, up.weight, factor)  # ``out`` is then not computed
        if lora.dropout and torch.is_grad_enabled():
            place = module.share.place
            if counts and place is None:  # how many rows come to experts must not change what later layers draw
                place = 0
            x = dropped(x, lora.dropout, place)
        total: torch.Tensor = out + up(down(x, *counts) * factor, *counts)
        if not lora.dora:
            return total
        # Sharded, the magnitude comes in the compute type: the norms are rounded alike, so that both cancel at first.
        share, sizes = module.share, local(module.lora_m)
        norms = norms_of(module, factor, share).to(sizes.dtype)
        gain: torch.Tensor = (sizes[share.rows] / norms).to(out.dtype)
        if module.bias is None or share.group is not None:
            return total * gain
        bias: torch.Tensor = local(module.bias)[share.rows].to(out.dtype)
        return (total - bias) * gain + bias

    module.share = WHOLE  # type: ignore[assignment]
    return module.register_forward_hook(add)


def merged(module: nn.Module, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``factor`` B A, computed in fp32 or wider, and the weight that computes what the layer does with its
    adapter, in the dtype of its weight."""
    weight = module.get_parameter("weight")
    kind = accumulation_dtype(weight.dtype)
    down, up = (module.get_parameter(f"{name}.weight").to(kind) for name in ("lora_a", "lora_b"))
    delta = factor * product(up, down, module.experts if isinstance(module, Stacked) else 1)
    wide: torch.Tensor = weight.to(kind) + delta
    if "lora_m" in dict(module.named_parameters(recurse=False)):
        wide *= (module.get_parameter("lora_m").to(kind) / torch.linalg.vector_norm(wide, dim=1)).unsqueeze(1)
    return delta, wide.to(weight.dtype)


def product(up: torch.Tensor, down: torch.Tensor, experts: int) -> torch.Tensor:
    """Return B A [E*n,k] of B [E*n,r] and A [E*r,k], each of so many experts."""
    each = torch.bmm(up.unflatten(0, (experts, -1)), down.unflatten(0, (experts, -1)))
    return each.flatten(0, 1)
