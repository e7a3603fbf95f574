"""The row norms of DoRA (Liu et al., arXiv 2402.09353): y = m * (W + s B A) x / |W + s B A|, row by row."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.distributed.slices import local
from shardwise.techniques.quantised import rows_at_once
from shardwise.techniques.share import WHOLE, LayerShare


@torch.no_grad()
def row_norms(module: nn.Module, factor: float, share: LayerShare = WHOLE) -> Tensor:
    """Return the norm [out] of each row of W + ``factor`` B A, in fp32 or wider; treated as a constant in the gradient,
    as in the paper (section 4.3). Computed some rows at a time."""
    dequantised = vars(module).get("dequantised")  # how a layer that has no weight makes it
    weight = dequantised() if dequantised else local(module.get_parameter("weight"))[share.rows]
    down, up = (local(module.get_parameter(f"{name}.weight")) for name in ("lora_a", "lora_b"))
    norms: Tensor = _row_norms(weight, down, up[share.rows], factor)
    if share.group is not None:
        dist.all_reduce(norms.square_(), group=share.group)
        norms.sqrt_()
    return norms


@torch.library.custom_op(
    "shardwise::row_norms",
    mutates_args=(),
    schema="(Tensor weight, Tensor down, Tensor up, float factor) -> Tensor",
)
def _row_norms(weight: Tensor, down: Tensor, up: Tensor, factor: float) -> Tensor:
    """One operation, since in how many rounds it runs depends on sizes; quantised.py says what it takes meanwhile."""
    wide = torch.promote_types(up.dtype, torch.float32)
    norms = torch.empty(weight.shape[0], dtype=wide, device=weight.device)
    down, step = down.to(wide), rows_at_once(*weight.shape)
    for start in range(0, weight.shape[0], step):
        part = slice(start, start + step)
        rows = (up[part].to(wide) @ down).mul_(factor).add_(weight[part])
        norms[part] = torch.linalg.vector_norm(rows, dim=1)
        del rows
    return norms


@_row_norms.register_fake
def _(weight: Tensor, down: Tensor, up: Tensor, factor: float) -> Tensor:
    return weight.new_empty(weight.shape[0], dtype=torch.promote_types(up.dtype, torch.float32))
