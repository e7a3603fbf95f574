"""Linear layer and cross-entropy in one, a chunk of tokens at a time: the logits of all tokens never exist.

Gradients of the hidden states and of the weight are made in the forward pass, while a chunk's logits are at hand; the
backward pass scales them (Hsu et al., "Liger Kernel", 2024). So a loss can be propagated once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.models.layers import accumulation_dtype

IGNORED = -100


def _log_probabilities(hidden: Tensor, weight: Tensor) -> Tensor:
    """[n,V] in fp32 (fp64) of hidden [n,d] and weight [V,d]."""
    return torch.log_softmax(hidden @ weight.mT, -1, dtype=accumulation_dtype(hidden.dtype))


def _pick(logs: Tensor, labels: Tensor) -> Tensor:
    """Losses [n], 0 where the label is ignored."""
    picked = logs.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return -picked.masked_fill_(labels == IGNORED, 0.0)


def _logit_gradient(logs: Tensor, labels: Tensor) -> Tensor:
    """Probabilities less one at the label, zero rows where ignored; in place."""
    supervised = (labels != IGNORED).unsqueeze(-1).to(logs.dtype)
    return (
        logs.exp_().scatter_add_(-1, labels.clamp_min(0).unsqueeze(-1), -torch.ones_like(supervised)).mul_(supervised)
    )


class _LinearCrossEntropy(torch.autograd.Function):
    """Saves the gradients that are wanted: of hidden in its dtype, of the weight in the compute dtype (one chunk) or
    fp32 (several; fp64 for fp64)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
        wide = accumulation_dtype(hidden.dtype)
        cast = weight.to(hidden.dtype)
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        single = hidden.shape[0] <= chunk_tokens
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(cast, dtype=wide) if want_weight and not single else None
        total = hidden.new_zeros((), dtype=wide)
        for start in range(0, hidden.shape[0], chunk_tokens):
            tokens = slice(start, start + chunk_tokens)
            logs = _log_probabilities(hidden[tokens], cast)
            total += _pick(logs, labels[tokens]).sum()
            slope = _logit_gradient(logs, labels[tokens]).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(slope, cast, out=grad_hidden[tokens])
            if grad_weight is not None and slope.dtype == wide:
                grad_weight.addmm_(slope.mT, hidden[tokens])
            elif grad_weight is not None:
                grad_weight += slope.mT @ hidden[tokens]
            elif want_weight:
                grad_weight = slope.mT @ hidden
            del logs, slope  # or they would live on while the next chunk's are made
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden.mul_(grad)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
    """The sum of the token losses, a scalar in fp32 (fp64 for fp64).

    hidden [..,d], weight [V,d] (cast to hidden's dtype), labels int64 [..] with -100 where nothing is to be learned.
    """
    if not torch.is_grad_enabled():
        return token_losses(hidden, weight, labels, chunk_tokens).sum()
    flat = hidden.reshape(-1, hidden.shape[-1])
    return _LinearCrossEntropy.apply(flat, weight, labels.reshape(-1), chunk_tokens)


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
    """The loss of each token, shaped as ``labels``, 0 where ignored; without gradients, for evaluation."""
    cast = weight.to(hidden.dtype)
    chunks = zip(hidden.flatten(0, -2).split(chunk_tokens), labels.flatten().split(chunk_tokens), strict=True)
    return torch.cat([_pick(_log_probabilities(h, cast), y) for h, y in chunks]).view_as(labels)
