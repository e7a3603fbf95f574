"""cuDNN's attention, where every row is one document."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.models.blockwise import Rule, Saved

aten = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """out [b,h,s,e] and lse [b,h,s]."""
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, rule.causal, scale=rule.scale)
    return out, lse.squeeze(-1)


def backward(grad: Tensor, saved: Saved, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    *tensors, lse = saved
    s = grad.shape[2]
    no_dropout = torch.empty((), dtype=torch.int64, device=grad.device)
    whole_rows = (no_dropout, no_dropout, None, None, None, s, s, 0.0, rule.causal)
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        grad, *tensors, lse.unsqueeze(-1), *whole_rows, scale=rule.scale
    )
    return dq, dk, dv
