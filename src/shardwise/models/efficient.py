"""xFormers' memory-efficient attention, which ships with torch. It needs one key head per query head, and returns the
log-sum-exp document by document, each padded to the longest and to a multiple of 32 tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.models.blockwise import Rule, Saved

aten = torch.ops.aten
PAD = 32


def forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """out [b,h,s,e] and lse [b,h,s]."""
    b, h, s, _ = q.shape
    q, k, v = _tokens_first(rule, q, *(_each(x, h) for x in (k, v)))
    longest = None if rule.documents is None else rule.longest
    bounds = (rule.documents, rule.documents, longest, longest)
    out, lse, *_ = aten._efficient_attention_forward(
        q, k, v, None, *bounds, 0.0, int(rule.causal), True, scale=rule.scale
    )
    if rule.documents is None:
        return out.transpose(1, 2), lse[..., :s]
    document, place = _places(rule.documents, b * s)
    lse = lse[document, :, place].view(b, s, h).transpose(1, 2)
    return out.view(b, s, h, -1).transpose(1, 2), lse


def backward(grad: Tensor, saved: Saved, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    b, h, s, _ = grad.shape
    kv_heads = saved.k.shape[1]
    grad, q, k, v, out = _tokens_first(rule, grad, saved.q, *(_each(x, h) for x in (saved.k, saved.v)), saved.out)
    longest = s if rule.documents is None else rule.longest
    bounds = (rule.documents, rule.documents, longest, longest)
    no_dropout = torch.empty((), dtype=torch.int64, device=grad.device)
    dq, dk, dv, _ = aten._efficient_attention_backward(
        *(grad, q, k, v, None, out, *bounds, _padded(saved.lse, rule)),
        *(0.0, no_dropout, no_dropout, int(rule.causal), False),
        scale=rule.scale,
    )
    dq, dk, dv = (x.view(b, -1, *x.shape[-2:]).transpose(1, 2) for x in (dq, dk, dv))
    return dq, *(x.unflatten(1, (kv_heads, -1)).sum(2, dtype=torch.float32).to(x.dtype) for x in (dk, dv))


def _each(x: Tensor, heads: int) -> Tensor:
    """A copy of its key head for every query head."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def _tokens_first(rule: Rule, *tensors: Tensor) -> list[Tensor]:
    """[b,h,s,e] -> [b,s,h,e], or all tokens in one row [1,b*s,h,e] when there are documents."""
    moved = [x.transpose(1, 2) for x in tensors]
    return moved if rule.documents is None else [x.flatten(0, 1).unsqueeze(0) for x in moved]


def _places(documents: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return for every token its document and its position in it."""
    flat = torch.arange(tokens, dtype=documents.dtype, device=documents.device)
    document = torch.bucketize(flat, documents, right=True) - 1
    return document, flat - documents[document]


def _padded(lse: Tensor, rule: Rule) -> Tensor:
    """The log-sum-exp in the layout that forward returns: infinite beyond the end of a document, so that padding has no
    weight."""
    b, h, s = lse.shape
    if rule.documents is None:
        return torch.nn.functional.pad(lse, (0, -s % PAD), value=torch.inf)
    longest = rule.longest + -rule.longest % PAD
    padded = lse.new_full((rule.documents.shape[0] - 1, h, longest), torch.inf)
    document, place = _places(rule.documents, b * s)
    padded[document, :, place] = lse.transpose(1, 2).flatten(0, 1)
    return padded
