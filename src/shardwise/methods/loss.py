"""Linear layer and cross-entropy in one, a chunk of tokens at a time: the logits of all tokens never exist.

Gradients of the hidden states and of the weight are made in the forward pass, while a chunk's logits are at hand; the
backward pass scales them (Hsu et al., "Liger Kernel", 2024). So a loss can be propagated once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.data.batch import MicroBatch
from shardwise.models.layers import accumulation_dtype, soft_cap
from shardwise.spec.cluster import joins_products

IGNORED = -100
Finish = Callable[[Tensor, "Output", MicroBatch, float], Tensor]
"""(hidden [b,s,d], output layer, micro-batch, denominator) -> the sum of its terms / denominator, a scalar."""
Score = Callable[[Tensor, "Output", MicroBatch], Tensor]
"""(hidden [b,s,d], output layer, micro-batch) -> whatever is asked of them."""


@dataclass(frozen=True)
class Output:
    """The output layer as a method finds it: its weight [V,d], and what caps its logits."""

    weight: Tensor
    soft_cap: float | None


def logits(hidden: Tensor, head: Output, batch: MicroBatch | None = None) -> Tensor:
    """[..,V] in fp32 of hidden [..,d], whole."""
    return soft_cap((hidden @ head.weight.to(hidden.dtype).T).float(), head.soft_cap)


def _log_probabilities(hidden: Tensor, weight: Tensor) -> Tensor:
    """[n,V] in fp32 (fp64) of hidden [n,d] and weight [V,d]."""
    return torch.log_softmax(hidden @ weight.mT, -1, dtype=accumulation_dtype(hidden.dtype))


def _capped(hidden: Tensor, weight: Tensor, soft_cap: float) -> Tensor:
    """Logits [n,V] in fp32 (fp64), as cap * tanh(logits / cap)."""
    return (hidden @ weight.mT).to(accumulation_dtype(hidden.dtype)).div_(soft_cap).tanh_().mul_(soft_cap)


def _capped_slope(capped: Tensor, soft_cap: float) -> Tensor:
    """The derivative of :func:`_capped` by the logits, 1 - tanh^2, in the place of its result."""
    return capped.div_(soft_cap).square_().neg_().add_(1.0)


def _pick(logs: Tensor, labels: Tensor) -> Tensor:
    """Losses [n], 0 where the label is ignored."""
    picked = logs.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return -picked.masked_fill_(labels == IGNORED, 0.0)


def _logit_gradient(logs: Tensor, labels: Tensor) -> Tensor:
    """Probabilities less one at the label, zero rows where ignored; in place."""
    supervised = (labels != IGNORED).unsqueeze(-1).to(logs.dtype)
    less = -torch.ones_like(supervised)
    return logs.exp_().scatter_add_(-1, labels.clamp_min(0).unsqueeze(-1), less).mul_(supervised)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``; the total is wider."""
    if joins_products(total.device.type):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


class _LinearCrossEntropy(torch.autograd.Function):
    """Saves the gradients that are wanted: of hidden in its dtype, of the weight in the compute dtype (one chunk) or
    fp32 (several; fp64 for fp64)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk_tokens: int,
        soft_cap: float | None,
        factors: Tensor | None,
    ) -> Tensor:
        wide = accumulation_dtype(hidden.dtype)
        cast = weight.to(hidden.dtype)
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        single = hidden.shape[0] <= chunk_tokens
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(cast, dtype=wide) if want_weight and not single else None
        total = hidden.new_zeros((), dtype=wide)
        for start in range(0, hidden.shape[0], chunk_tokens):
            tokens = slice(start, start + chunk_tokens)
            capped = None if soft_cap is None else _capped(hidden[tokens], cast, soft_cap)
            logs = _log_probabilities(hidden[tokens], cast) if capped is None else torch.log_softmax(capped, -1)
            losses = _pick(logs, labels[tokens])
            total += losses.sum() if factors is None else losses @ factors[tokens]
            slope = _logit_gradient(logs, labels[tokens])
            if factors is not None:
                slope = slope.mul_(factors[tokens].unsqueeze(-1))
            if capped is not None and soft_cap is not None:
                slope = slope.mul_(_capped_slope(capped, soft_cap))
            del capped
            slope = slope.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(slope, cast, out=grad_hidden[tokens])
            if grad_weight is not None and slope.dtype == wide:
                grad_weight.addmm_(slope.mT, hidden[tokens])
            elif grad_weight is not None:
                _add_product(grad_weight, slope.mT, hidden[tokens])
            elif want_weight:
                grad_weight = slope.mT @ hidden
            del logs, slope  # or they would live on while the next chunk's are made
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden.mul_(grad)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_tokens: int,
    soft_cap: float | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """The sum of the token losses, each times its factor, a scalar in fp32 (fp64 for fp64).

    hidden [..,d], weight [V,d] (cast to hidden's dtype), labels int64 [..] with -100 where nothing is to be learned,
    ``factors`` like labels in the result's dtype, constants; None: all 1. ``soft_cap`` is the model's final one: logits
    become cap * tanh(logits / cap).
    """
    if not torch.is_grad_enabled():
        losses = token_losses(hidden, weight, labels, chunk_tokens, soft_cap)
        return (losses if factors is None else losses * factors).sum()
    flat = hidden.reshape(-1, hidden.shape[-1])
    factors = None if factors is None else factors.reshape(-1)
    return _LinearCrossEntropy.apply(flat, weight, labels.reshape(-1), chunk_tokens, soft_cap, factors)


@torch.no_grad()
def token_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, soft_cap: float | None = None
) -> Tensor:
    """The loss of each token, shaped as ``labels``, 0 where ignored; without gradients, for evaluation."""
    cast = weight.to(hidden.dtype)

    def logs(h: Tensor) -> Tensor:
        return _log_probabilities(h, cast) if soft_cap is None else _capped(h, cast, soft_cap).log_softmax(-1)

    chunks = zip(hidden.flatten(0, -2).split(chunk_tokens), labels.flatten().split(chunk_tokens), strict=True)
    return torch.cat([_pick(logs(h), y) for h, y in chunks]).view_as(labels)
