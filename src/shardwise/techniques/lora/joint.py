"""A frozen layer and its adapter as one product, for compiled blocks.

The compiler joins the sum of both products with what reads it, the gate of an MLP and its gradients above all: each
product waits until all have been made, and a recomputed block holds nine tensors of the MLP's width where six will do.
One operation that adds the second product to the first leaves one, and reads and writes no more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.models.layers import returned


@torch.library.custom_op("shardwise::two_products", mutates_args=())
def two_products(a: Tensor, u: Tensor, b: Tensor, v: Tensor) -> Tensor:
    """a [m,k] times u [k,n], and b [m,r] times v [r,n] added to it -> [m,n]."""
    return torch.mm(a, u).addmm_(b, v)


@two_products.register_fake
def _(a: Tensor, u: Tensor, b: Tensor, v: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], u.shape[1])


class _Joint(torch.autograd.Function):
    """Saves the input, what the adapter makes of it at its rank, and the three matrices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, down: Tensor, up: Tensor, factor: float) -> Tensor:
        small = torch.mm(x, down.t()) * factor
        ctx.save_for_backward(x, small, weight, down, up)
        ctx.factor = factor
        return returned(two_products(x, weight.t(), small, up.t()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor, Tensor, None]:
        x, small, weight, down, up = ctx.saved_tensors
        grad_small = torch.mm(grad, up) * ctx.factor
        grad_x = two_products(grad, weight, grad_small, down) if ctx.needs_input_grad[0] else None
        return grad_x, None, torch.mm(grad_small.t(), x), torch.mm(grad.t(), small), None


def joins(module: nn.Module) -> bool:
    """Return whether the layer's product is that of ``nn.Linear`` and nothing else, with a weight that is not
    trained."""
    plain = type(module) is nn.Linear and "forward" not in vars(module)
    return plain and module.bias is None and not module.weight.requires_grad


def joint(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, factor: float) -> Tensor:
    """x [..,k] W^T + factor x A^T B^T [..,n], of weight W [n,k] and an adapter's A [r,k] and B [n,r], in the dtype of
    x."""
    rows = x.reshape(-1, x.shape[-1])
    out: Tensor = _Joint.apply(rows, weight, down.to(x.dtype), up.to(x.dtype), factor)
    return out.unflatten(0, x.shape[:-1])
