"""Attention whose keys are on several ranks, as one operation, ``shardwise::attention_over_ranks``.

A rank computes with its own keys first, then with those that come (exchange.py), and joins what it finds by the
log-sum-exps, in fp32: out = sum of out_i * exp(lse_i - lse). For backward it saves q, k, v, the joined output and
log-sum-exp of its own tokens, no keys of others: they come once more, and with the joined log-sum-exp each part's
gradients are those of the whole softmax. Gradients are summed in fp32 (fp64 for fp64).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.distributed.torch_private import group_named
from shardwise.models import blockwise
from shardwise.models.attention import attention, attention_backward
from shardwise.models.blockwise import Saved
from shardwise.models.layers import accumulation_dtype
from shardwise.spec.rows import WholeRows
from shardwise.techniques.cp.exchange import GatherExchange, RingExchange
from shardwise.techniques.cp.parts import KernelCall, Sees, parts


class CutRule(NamedTuple):
    """The mask, and over whom rows are cut: ``group`` is the name of the ranks' process group; ``gathered``: their keys
    come all at once; ``length`` is ``row_length`` of ``MaskSpec``, and the others are as there."""

    sinks: Tensor | None
    bounds: Tensor | None
    group: str
    gathered: bool
    length: int
    causal: bool
    window: int | None
    soft_cap: float | None
    scale: float | None
    kernel: str

    @property
    def rows(self) -> WholeRows:
        return WholeRows(self.length, None if self.bounds is None else tuple(self.bounds.tolist()))

    @property
    def sees(self) -> Sees:
        return Sees(self.causal, self.window)

    def exchange(self, count: int) -> RingExchange | GatherExchange:
        group = group_named(self.group)
        return (
            GatherExchange(group, self.rows, count)
            if self.gathered
            else RingExchange(group, self.rows, count, self.sees)
        )

    def part(self, part: KernelCall, device: torch.device) -> tuple[Any, ...]:
        """Return the mask of one call of a kernel."""
        bounds = _bounds(part.lengths, device) if part.lengths else None
        longest = max(part.lengths, default=0)
        causal = self.causal and part.apart is None
        return bounds, None, None, causal, self.window, longest, self.soft_cap, self.scale, self.kernel, part.apart


@lru_cache(maxsize=64)
def _bounds(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


_RULE = (
    "Tensor? sinks, Tensor? bounds, str group, bool gathered, SymInt length, bool causal, int? window, "
    "float? soft_cap, float? scale, str pinned"
)


def forward(q: Tensor, k: Tensor, v: Tensor, *cut: Any) -> tuple[Tensor, Tensor]:
    """Compute what :func:`attention_over_ranks` returns, operation by operation."""
    rule = CutRule(*cut)
    count = q.shape[0]
    wide = accumulation_dtype(q.dtype)
    exchange = rule.exchange(count)
    out = torch.zeros_like(q if k.shape == v.shape else _as_wide_as(v, q), dtype=wide)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
    for owner, keys in exchange.keys(_together(k, v)):
        for part in () if keys is None else parts(rule.rows, count, exchange.place, owner, rule.sees):
            assert keys is not None
            mine, theirs = _places(part)
            each, each_lse = attention(q[mine], *(one[theirs] for one in _apart(keys, k)), *rule.part(part, q.device))
            before = lse[mine]
            joined = torch.logaddexp(before, each_lse)
            out[mine] *= (before - joined).exp_().unsqueeze(-1)
            out[mine] += each * (each_lse - joined).exp_().unsqueeze(-1)
            lse[mine] = joined
            del before, joined, each, each_lse  # or they would live on while the next part is computed
        del keys
    if rule.sinks is not None:
        out, lse = blockwise.with_sinks(out, lse, rule.sinks)
    return out.to(q.dtype), lse


def backward(grad: Tensor, *saved_and_cut: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute what :func:`attention_over_ranks_backward` returns, operation by operation."""
    saved, rule = Saved(*saved_and_cut[:5]), CutRule(*saved_and_cut[5:])
    q, k, v, out, lse = saved
    count, wide = q.shape[0], lse.dtype
    exchange = rule.exchange(count)
    grad_q = torch.zeros_like(q, dtype=wide)
    home = torch.zeros(_shape(k, v), dtype=wide, device=k.device)  # of this rank's own keys and values
    sums: Tensor | None = None  # of those that were here before
    for step, (owner, keys) in enumerate(exchange.keys(_together(k, v))):
        passing = exchange.passed(step, sums, home)
        sums = home if step == 0 else None if keys is None else torch.zeros_like(keys, dtype=wide)
        for part in () if keys is None else parts(rule.rows, count, exchange.place, owner, rule.sees):
            assert keys is not None and sums is not None
            mine, theirs = _places(part)
            their_k, their_v = (one[theirs] for one in _apart(keys, k))
            given = grad[mine], q[mine], their_k, their_v, out[mine], lse[mine].contiguous()
            of_q, of_k, of_v, _ = attention_backward(*given, *rule.part(part, q.device))
            grad_q[mine] += of_q
            of_keys, of_values = _apart(sums, k)
            of_keys[theirs] += of_k
            of_values[theirs] += of_v
            del given, their_k, their_v, of_q, of_k, of_v
        passing.add(sums, home)
        sums = None if step == 0 else sums
        del passing, keys
    exchange.passed(exchange.steps, sums, home).add(None, home)
    grad_sinks = grad.new_empty(0) if rule.sinks is None else blockwise.sink_gradient(grad, saved, rule.sinks)
    grad_k, grad_v = (torch.empty_like(x).copy_(one) for x, one in zip((k, v), _apart(home, k), strict=True))
    return grad_q.to(q.dtype), grad_k, grad_v, grad_sinks


def _shape(k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return the shape of keys and values as one tensor: one behind the other, or, of unlike width, beside each
    other."""
    return (2, *k.shape) if k.shape == v.shape else (1, *k.shape[:-1], k.shape[-1] + v.shape[-1])


def _together(k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([k, v]) if k.shape == v.shape else torch.cat([k, v], -1).unsqueeze(0)


def _apart(both: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two views of keys and values as one tensor."""
    if both.shape[0] == 2:
        return both[0], both[1]
    width = k.shape[-1]
    return both[0, ..., :width], both[0, ..., width:]


def _as_wide_as(v: Tensor, q: Tensor) -> Tensor:
    """Return a tensor laid out as queries are, as wide as values."""
    b, h, s, _ = q.shape
    return q.new_empty(b, s, h, v.shape[-1]).transpose(1, 2)


def _places(part: KernelCall) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return where the queries of a call and its keys are."""
    return (slice(*part.rows), slice(None), slice(*part.queries)), (slice(*part.rows), slice(None), slice(*part.keys))


_BACKWARD = f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_RULE})"
attention_over_ranks = torch.library.custom_op(
    "shardwise::attention_over_ranks",
    forward,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_RULE}) -> (Tensor, Tensor)",
)
attention_over_ranks_backward = torch.library.custom_op(
    "shardwise::attention_over_ranks_backward",
    backward,
    mutates_args=(),
    schema=f"{_BACKWARD} -> (Tensor, Tensor, Tensor, Tensor)",
)


@attention_over_ranks.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _as_wide_as(v, q) if k.shape != v.shape else torch.empty_like(q), q.new_empty(
        q.shape[:3], dtype=accumulation_dtype(q.dtype)
    )


@attention_over_ranks_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *cut: Any) -> tuple[Tensor, ...]:
    rule = CutRule(*cut)
    grad_sinks = grad.new_empty(0) if rule.sinks is None else torch.empty_like(rule.sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), grad_sinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, bounds, *settings = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.settings = settings
    ctx.save_for_backward(q, k, v, *output, sinks, bounds)


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:  # nothing that was computed from ``out`` has a gradient; other ranks find the same
        return (None,) * (5 + len(ctx.settings))
    *grads, grad_sinks = attention_over_ranks_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return *grads, grad_sinks if ctx.needs_input_grad[3] else None, *[None] * (1 + len(ctx.settings))


attention_over_ranks.register_autograd(_backward, setup_context=_save)
