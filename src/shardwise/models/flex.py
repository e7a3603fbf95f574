"""FlexAttention: torch compiles a kernel for the mask and the cap. It saves only what the operation saves: backward
computes forward again, and differentiates that."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from shardwise.distributed.torch_private import differentiable_inside_operations
from shardwise.models import blockwise
from shardwise.models.blockwise import Rule, Saved

BLOCK = 128


def forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """out [b,h,s,e] and lse [b,h,s]."""
    cap, aux = rule.soft_cap, AuxRequest(lse=True)
    capped = None if cap is None else lambda score, b, h, i, j: torch.tanh(score / cap) * cap
    out, statistics = _compiled()(
        *(q, k, v, capped, block_mask(q, rule), rule.scale), enable_gqa=q.shape[1] > k.shape[1], return_aux=aux
    )
    return out, statistics.lse


def backward(grad: Tensor, saved: Saved, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    with differentiable_inside_operations(), torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in saved[:3])
        out, lse = forward(q, k, v, rule)
        if rule.sinks is not None:
            out, _ = blockwise.with_sinks(out, lse, rule.sinks)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
    return dq, dk, dv


@cache
def _compiled() -> Any:
    # One graph for forward and backward, each kind of layer, each number of rows: more than torch's default of 8.
    torch.compiler.config.recompile_limit = max(64, torch.compiler.config.recompile_limit)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def block_mask(q: Tensor, rule: Rule) -> BlockMask:
    """Return the blocks that are computed, found from positions in the row alone, so that nothing is read back from the
    device. Within them the mask decides element by element."""
    s = q.shape[2]
    count, reach = -(-s // BLOCK), blockwise.reach(rule, s)
    place = torch.arange(count, device=q.device, dtype=torch.int32)
    far = -(-(reach - 1) // BLOCK)
    first = (place - far).clamp(min=0)
    last = place if rule.causal else (place + far).clamp(max=count - 1)
    indices = (first[:, None] + place).clamp(max=count - 1)
    # Not the longest document, which is another in every batch: what the mask reads is compiled into the kernel.
    numbers = blockwise.numbers(q, rule)
    causal = rule.causal
    window = rule.window

    def seen(row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        allowed = i >= j if causal else i >= 0
        if window is not None:
            allowed = allowed & (i - j < window) & (j - i < window)
        return allowed if numbers is None else allowed & (numbers[row, i] == numbers[row, j])

    shape = (1, 1, count)
    return BlockMask.from_kv_blocks(
        *((last - first + 1).view(shape), indices.view(*shape, count)),
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(s, s),
    )
