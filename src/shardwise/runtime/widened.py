"""bf16 on CPUs without instructions for it, where torch multiplies four times as slowly as in fp32: matrix products and
attention are computed in fp32, of operands widened and to a result rounded, which takes what fp32 takes and errs less.
Batched products, attention under a dense mask, and products of few rows are left to torch.

It stands below autograd and for the whole process, as torch's own settings of products do: modules of anyone's and
compiled graphs are served as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

from shardwise.techniques.numbers import WIDENED_NUMBERS

FEW_ROWS = 16
"""Below so many rows (generating a token at a time) torch's own products in bf16 are faster."""
_registered: list[Library] = []
Kernel = Callable[..., Any]


def widen_bf16(on: bool) -> None:
    """Widen bf16 products on the CPU from now on, or leave them to torch again."""
    if on == bool(_registered):
        return
    if not on:
        _registered.pop()._destroy()
        return
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name, instead in INSTEAD.items():
            torchs = get_kernel(f"aten::{name}", "CPU").call_boxed
            library.impl(name, _standing_in(instead, torchs), "CPU", with_keyset=True)
    _registered.append(library)


def _standing_in(instead: Kernel, torchs: Kernel) -> Kernel:
    return lambda keys, *given, **named: instead(partial(torchs, keys), *given, **named)


def _product(torchs: Kernel, *given: Any, out: Tensor | None = None, **factors: Any) -> Tensor:
    """mm and addmm; what is not widened is left to torch's own."""
    left, right = given[-2:]
    narrow = left.dtype == right.dtype == torch.bfloat16 and left.ndim == right.ndim == 2
    if narrow and left.shape[1] == right.shape[0] > 0 and left.shape[0] >= FEW_ROWS:
        shape = (left.shape[0], right.shape[1])
        # Autocast would take the product in fp32 that is meant for ``out`` for one to narrow.
        fits = out is None or (out.dtype == left.dtype and out.shape == shape and not torch.is_autocast_enabled("cpu"))
        if fits and given[0].dtype == left.dtype and all(factor == 1 for factor in factors.values()):
            added = given[0].expand(shape) if len(given) == 3 else None
            return multiply(left, right, added, left.new_empty(shape) if out is None else out)
    result: Tensor = torchs(*given, **factors) if out is None else torchs(*given, **factors, out=out)
    return result


def multiply(left: Tensor, right: Tensor, added: Tensor | None, out: Tensor) -> Tensor:
    """``out`` [m,n] = left [m,k] @ right [k,n] (+ added [m,n]), a piece at a time: each of the three that stand in fp32
    meanwhile has at most ``WIDENED_NUMBERS`` numbers (or one row)."""
    (m, k), n = left.shape, right.shape[1]
    columns = max(1, min(n, WIDENED_NUMBERS // k))
    rows = max(1, min(m, WIDENED_NUMBERS // max(k, columns)))
    for column in range(0, n, columns):
        wide = right[:, column : column + columns].float()
        for row in range(0, m, rows):
            piece = (slice(row, row + rows), slice(column, column + columns))
            product = left[piece[0]].float() @ wide
            out[piece] = product if added is None else product.add_(added[piece])
            del product  # or it would live on while the next one is made
    return out


def _attention(torchs: Kernel, q: Tensor, k: Tensor, v: Tensor, *given: Any, **rest: Any) -> Any:
    """q [b,h,s,e], k and v [b,hk,s,e] -> out [b,h,s,e], lse [b,h,s] in fp32; a few heads at a time. ``given``: share
    dropped, causality."""
    if q.dtype != torch.bfloat16 or any(given[:1]) or rest.get("attn_mask") is not None:
        return torchs(q, k, v, *given, **rest)
    b, h, s, _ = q.shape
    # Laid out as torch's kernel does, which compiled graphs take for granted.
    out, lse = torch.empty_like(q), q.new_empty((b, s, h), dtype=torch.float32).transpose(1, 2)
    for own, shared in _heads(q, k):
        out[own], lse[own] = torchs(q[own].float(), k[shared].float(), v[shared].float(), *given, **rest)
    return out, lse


def _attention_backward(torchs: Kernel, grad: Tensor, *given: Any, **rest: Any) -> Any:
    q, k, v, out, lse, dropout, causal = given
    if q.dtype != torch.bfloat16 or dropout or rest.get("attn_mask") is not None:
        return torchs(grad, *given, **rest)
    grads = tuple(x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))
    for own, shared in _heads(q, k):
        wide = [x[piece].float() for x, piece in ((grad, own), (q, own), (k, shared), (v, shared), (out, own))]
        parts = torchs(*wide, lse[own], dropout, causal, **rest)
        for whole, piece, part in zip(grads, (own, shared, shared), parts, strict=True):
            whole[piece] = part
        del wide, parts, part
    return grads


def _heads(q: Tensor, k: Tensor) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
    """Pieces of q (and its like) and of k and v that belong together: of one row, as many heads as
    ``WIDENED_NUMBERS`` allow, and at least those that share one of k."""
    b, h, s, e = q.shape
    groups, each = k.shape[1], h // k.shape[1]
    few = max(1, WIDENED_NUMBERS // (each * max(s, k.shape[2]) * e))
    for row in range(b):
        for first in range(0, groups, few):
            last = min(first + few, groups)
            yield (slice(row, row + 1), slice(first * each, last * each)), (slice(row, row + 1), slice(first, last))


_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
INSTEAD: dict[str, Callable[..., Any]] = dict.fromkeys(("mm", "mm.out", "addmm", "addmm.out"), _product)
INSTEAD |= {_FLASH: _attention, f"{_FLASH}_backward": _attention_backward}
