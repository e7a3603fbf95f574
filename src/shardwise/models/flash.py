"""FlashAttention as it ships with torch, on CPU and CUDA, for causal or full attention within documents. On CUDA
windows work too, and `fa3` replaces these operations where it is installed.

On a CPU documents are computed one at a time, and oneDNN compiles and caches code for every length: 1.2 GiB in the
backward of bf16, and in both directions of fp32 under the "medium" matmul setting (torch 2.13). So the backward of
16-bit documents is computed in fp32 and rounded, and fp32 uses "highest", which compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from shardwise.models.blockwise import Rule, Saved
from shardwise.models.layers import accumulation_dtype

aten = torch.ops.aten
WIDE_NUMBERS = 2**19
"""How many elements of a document's queries are computed in fp32 at a time: 2 MiB in each of the eight tensors; or the
queries of one key head, if those are more."""


def forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """out [b,h,s,e] and lse [b,h,s]."""
    if q.device.type != "cpu":
        return _cuda_forward(q, k, v, rule)
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    if rule.documents is None:
        return flash(q, k, v, 0.0, rule.causal, scale=rule.scale)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    with _highest():
        for row, tokens in _segments(q, rule.documents):
            part = flash(q[row, :, tokens], k[row, :, tokens], v[row, :, tokens], 0.0, rule.causal, scale=rule.scale)
            out[row, :, tokens], lse[row, :, tokens] = part
    return out, lse


def backward(grad: Tensor, saved: Saved, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    if grad.device.type != "cpu":
        return _cuda_backward(grad, saved, rule)
    flash = aten._scaled_dot_product_flash_attention_for_cpu_backward
    if rule.documents is None:
        return flash(grad, *saved, 0.0, rule.causal, scale=rule.scale)
    grads = tuple(torch.empty_like(x) for x in saved[:3])
    with _highest():
        for row, tokens in _segments(grad, rule.documents):
            for own, shared in _heads(saved, tokens.stop - tokens.start):
                heads = (own, own, shared, shared, own, own)
                pieces = [_wide(x[row, h, tokens]) for x, h in zip((grad, *saved), heads, strict=True)]
                parts = flash(*pieces, 0.0, rule.causal, scale=rule.scale)
                for whole, h, part in zip(grads, heads[1:], parts, strict=False):
                    whole[row, h, tokens] = part
    return grads[0], grads[1], grads[2]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _heads(saved: Saved, length: int) -> Iterator[tuple[slice, slice]]:
    """(slice of query heads, slice of key heads) that belong together, as many as ``WIDE_NUMBERS`` allows in fp32."""
    groups, each = saved.k.shape[1], saved.q.shape[1] // saved.k.shape[1]
    narrow = saved.q.dtype in (torch.bfloat16, torch.float16)
    few = max(1, WIDE_NUMBERS // (each * length * saved.q.shape[-1])) if narrow else groups
    for first in range(0, groups, few):
        last = min(first + few, groups)
        yield slice(first * each, last * each), slice(first, last)


@contextmanager
def _highest() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    if before != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if before != "highest":
            torch.set_float32_matmul_precision(before)


def _segments(q: Tensor, documents: Tensor) -> Iterator[tuple[slice, slice]]:
    """(row, tokens) of each document."""
    length, bounds = q.shape[2], documents.tolist()
    for start, stop in pairwise(bounds):
        row = start // length
        yield slice(row, row + 1), slice(start - row * length, stop - row * length)


def _tokens_first(rule: Rule, *tensors: Tensor) -> list[Tensor]:
    """[b,h,s,e] -> [b,s,h,e], or all tokens in one row [b*s,h,e] when there are documents."""
    moved = [x.transpose(1, 2) for x in tensors]
    return moved if rule.documents is None else [x.flatten(0, 1) for x in moved]


def _window(rule: Rule, queries: int, keys: int) -> dict[str, int]:
    """Return a window as the kernel's arguments: how many keys a query sees before and after its own position. Where
    keys are apart, the kernel takes the last query to stand at the last key."""
    if rule.window is None:
        return {}
    before = after = rule.window - 1
    if rule.apart is not None:
        before, after = before + keys - queries - rule.apart, after - keys + queries + rule.apart
    return {"window_size_left": before, "window_size_right": 0 if rule.causal else after}


def _bounds(rule: Rule, queries: int, keys: int) -> tuple[Tensor | None, Tensor | None, int, int]:
    lengths = (queries, keys) if rule.documents is None else (rule.longest, rule.longest)
    return rule.documents, rule.documents, *lengths


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    (b, h, s, _), keys = q.shape, k.shape[2]
    tensors = _tokens_first(rule, q, k, v)
    out, lse, *_ = aten._flash_attention_forward(
        *tensors, *_bounds(rule, s, keys), 0.0, rule.causal, False, scale=rule.scale, **_window(rule, s, keys)
    )
    if rule.documents is None:
        return out.transpose(1, 2), lse
    return out.unflatten(0, (b, s)).transpose(1, 2), lse.view(h, b, s).transpose(0, 1)


def _cuda_backward(grad: Tensor, saved: Saved, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    (b, _, s, _), keys = grad.shape, saved.k.shape[2]
    grad, *tensors = _tokens_first(rule, grad, saved.q, saved.k, saved.v, saved.out)
    lse = saved.lse if rule.documents is None else saved.lse.transpose(0, 1).flatten(1)
    bounds, window = _bounds(rule, s, keys), _window(rule, s, keys)
    no_dropout = torch.empty(2, dtype=torch.uint64, device=grad.device)
    grads = aten._flash_attention_backward(
        grad, *tensors, lse, *bounds, 0.0, rule.causal, no_dropout, no_dropout, scale=rule.scale, **window
    )
    dq, dk, dv = (x if rule.documents is None else x.unflatten(0, (b, s)) for x in grads)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
