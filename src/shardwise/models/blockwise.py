"""Attention in plain torch, a block of queries by a block of keys, with an online softmax: the reference, and the
fallback for what no kernel serves. Memory beyond its results is a few blocks of scores, and in backward the gradients
of keys and values once more, in fp32.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al., "FlashAttention" (2022).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.models.layers import accumulation_dtype

BLOCK = 512


class Rule(NamedTuple):
    """The mask as the operation receives it; fields as in MaskSpec. ``apart``: None where queries and keys are of the
    same tokens; else so many positions before the first query stands the first key, and of no other kind is the mask
    than a window: all keys are before all queries, or (negative) behind them."""

    documents: Tensor | None
    sinks: Tensor | None
    positions: Tensor | None
    causal: bool
    window: int | None
    longest: int
    soft_cap: float | None
    scale: float | None = None
    kernel: str = "auto"
    apart: int | None = None


class Saved(NamedTuple):
    """The tensors that forward saves for backward."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class _TokenPlaces(NamedTuple):
    """Position and document of every query, [b,s] each, and the positions of keys [b,s]."""

    positions: Tensor
    documents: Tensor | None
    keys: Tensor


def _tokens(q: Tensor, k: Tensor, rule: Rule) -> _TokenPlaces:
    b, places = q.shape[0], rule.positions
    if places is None:
        places = torch.arange(q.shape[2], device=q.device).expand(b, -1)
    keys = places if rule.apart is None else torch.arange(k.shape[2], device=q.device).expand(b, -1)
    return _TokenPlaces(places + (rule.apart or 0), numbers(q, rule), keys)


def numbers(q: Tensor, rule: Rule) -> Tensor | None:
    """The number of each token's document, [b,s]; None without documents."""
    b, _, s, _ = q.shape
    if rule.documents is None:
        return None
    flat = torch.arange(b * s, dtype=rule.documents.dtype, device=q.device)
    return torch.bucketize(flat, rule.documents, right=True).view(b, s)


def reach(rule: Rule, length: int) -> int:
    """A query sees no key that is this many positions away, or more. Known without reading from the device."""
    return min(length, rule.longest if rule.documents is not None else length, rule.window or length)


def _blocks(s: int) -> list[slice]:
    return [slice(start, min(start + BLOCK, s)) for start in range(0, s, BLOCK)]


def _visible(tokens: _TokenPlaces, rule: Rule, rows: slice, columns: slice) -> Tensor:
    """[b,1,1,rows,columns]: whether this query may see this key."""
    distance = tokens.positions[:, rows, None] - tokens.keys[:, None, columns]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if tokens.documents is not None:
        seen = tokens.documents[:, rows, None] == tokens.documents[:, None, columns]
    if rule.causal:
        seen = seen & (distance >= 0)
    if rule.window is not None:
        seen = seen & (distance < rule.window) & (distance > -rule.window)
    return seen[:, None, None]


def _pairs(tokens: _TokenPlaces, rule: Rule, rows: slice, blocks: list[slice]) -> Iterator[tuple[slice, Tensor]]:
    """The blocks of keys that the queries in ``rows`` may see, each with its mask. On a CPU the mask itself decides
    whether a block is needed; on a GPU that would wait for the device, so positions alone decide."""
    far = reach(rule, blocks[-1].stop)
    for columns in blocks:
        if rule.positions is None and rule.apart is None:
            if columns.start >= rows.stop + (0 if rule.causal else far - 1):
                return
            if columns.stop <= rows.start - far + 1:
                continue
        seen = _visible(tokens, rule, rows, columns)
        if seen.device.type != "cpu" or bool(seen.any()):
            yield columns, seen


def _grouped(q: Tensor, kv_heads: int, wide: torch.dtype) -> Tensor:
    """[b,h,s,e] -> [b,hk,h/hk,s,e]: the queries beside the key head that they share."""
    return q.to(wide).unflatten(1, (kv_heads, -1))


def _scale(q: Tensor, rule: Rule) -> float:
    return q.shape[-1] ** -0.5 if rule.scale is None else rule.scale


def _scores(q: Tensor, k: Tensor, seen: Tensor, rule: Rule) -> Tensor:
    scores = q @ k.unsqueeze(2).mT * _scale(q, rule)
    if rule.soft_cap is not None:
        scores = torch.tanh(scores / rule.soft_cap) * rule.soft_cap
    return scores.masked_fill(~seen, -torch.inf)


def forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """out [b,h,s,e] and lse [b,h,s]. A row that sees nothing is zero, with lse -inf."""
    tokens = _tokens(q, k, rule)
    wide = accumulation_dtype(q.dtype)
    kv_heads = k.shape[1]
    blocks, key_blocks = _blocks(q.shape[2]), _blocks(k.shape[2])
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=wide)
    for rows in blocks:
        query = _grouped(q[:, :, rows], kv_heads, wide)
        total = torch.zeros_like(query)
        norm = query.new_full(query.shape[:-1], -torch.inf)
        for columns, seen in _pairs(tokens, rule, rows, key_blocks):
            scores = _scores(query, k[:, :, columns].to(wide), seen, rule)
            new = torch.logaddexp(norm, scores.logsumexp(-1))
            floor = new.masked_fill(new == -torch.inf, 0.0)
            share = (scores - floor.unsqueeze(-1)).exp()
            value = v[:, :, columns].to(wide).unsqueeze(2)
            total = total * (norm - floor).exp().unsqueeze(-1) + share @ value
            norm = new
        out[:, :, rows], lse[:, :, rows] = total.flatten(1, 2), norm.flatten(1, 2)
    return out, lse


def backward(grad: Tensor, saved: Saved, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; probabilities are recomputed from lse. Gradients of k and v are summed in fp32 (fp64 for
    fp64)."""
    q, k, v, out, lse = saved
    tokens = _tokens(q, k, rule)
    wide = lse.dtype
    kv_heads = k.shape[1]
    scale = _scale(q, rule)
    blocks, key_blocks = _blocks(q.shape[2]), _blocks(k.shape[2])
    grad_q = torch.empty_like(q)
    grad_k = torch.zeros_like(k, dtype=wide)
    grad_v = torch.zeros_like(v, dtype=wide)
    for rows in blocks:
        query, outer, result = (_grouped(x[:, :, rows], kv_heads, wide) for x in (q, grad, out))
        norm = lse[:, :, rows].unflatten(1, (kv_heads, -1)).unsqueeze(-1)
        norm = norm.masked_fill(norm == -torch.inf, 0.0)
        delta = (outer * result).sum(-1, keepdim=True)
        total = torch.zeros_like(query)
        for columns, seen in _pairs(tokens, rule, rows, key_blocks):
            key, value = k[:, :, columns].to(wide), v[:, :, columns].to(wide)
            scores = _scores(query, key, seen, rule)
            share = (scores - norm).exp()
            grad_v[:, :, columns] += (share.mT @ outer).sum(2)
            grad_scores = share * (outer @ value.unsqueeze(2).mT - delta) * scale
            if rule.soft_cap is not None:
                grad_scores = grad_scores * (1 - (scores.masked_fill(~seen, 0.0) / rule.soft_cap).square())
            total += grad_scores @ key.unsqueeze(2)
            grad_k[:, :, columns] += (grad_scores.mT @ query).sum(2)
        grad_q[:, :, rows] = total.flatten(1, 2)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out [b,h,s,e] and lse [b,h,s] of any kernel, corrected for sinks: logits [h] that take part in each row's softmax
    but have no value. The kernel's backward needs no change: it recomputes the probabilities from this lse."""
    whole = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    return (out * (lse - whole).exp().unsqueeze(-1)).to(out.dtype), whole


def sink_gradient(grad: Tensor, saved: Saved, sinks: Tensor) -> Tensor:
    """The gradient of the sinks, [h]: in each row a sink has the probability exp(sink - lse), and no value."""
    out, lse = saved.out, saved.lse
    share = (sinks.to(lse.dtype)[None, :, None] - lse).exp()
    return -(share * (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum((0, 2)).to(sinks.dtype)
