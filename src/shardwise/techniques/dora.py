"""The sizes that DoRA (Liu et al., arXiv 2402.09353) keeps apart: y = m * (W + s B A) x / |W + s B A|, row by row."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.techniques.fourbit import dequantise
from shardwise.techniques.quantised import NF4_PARTS, nf4_rows_at_once


@torch.no_grad()
def row_norms(module: nn.Module, factor: float) -> Tensor:
    """The norm [out] of each row of W + ``factor`` B A, in fp32 or wider; a constant for the gradient, as in the paper
    (section 4.3). Made some rows at a time."""
    if "codes" in dict(module.named_parameters(recurse=False)):
        codes, sizes, groups = (module.get_parameter(name) for name in NF4_PARTS)
        weight = dequantise(codes, sizes, groups, torch.float32)
    else:
        weight = module.get_parameter("weight")
    down, up = (module.get_parameter(f"{name}.weight") for name in ("lora_a", "lora_b"))
    wide = torch.promote_types(up.dtype, torch.float32)
    norms = torch.empty(weight.shape[0], dtype=wide, device=weight.device)
    step = nf4_rows_at_once(*weight.shape)
    for start in range(0, weight.shape[0], step):
        part = slice(start, start + step)
        # A batch of one, or recomputation would count this among the products that it keeps.
        rows = torch.bmm(up[None, part].to(wide), down[None].to(wide))[0].mul_(factor).add_(weight[part])
        norms[part] = torch.linalg.vector_norm(rows, dim=1)
    return norms
