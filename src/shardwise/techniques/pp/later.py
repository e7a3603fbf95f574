"""Gradients of weights that are made later than those of inputs: what zero-bubble schedules fill idle time with.

A backward comes in two halves there. The first passes gradients on to the stage before; the products that give the
gradients of the weights of a block's linear layers are put off, and run in the second. Between the two live their
operands, and nothing else of the graph. All other gradients (of norms, biases, embedding and output layer) are made in
the first half: they cost little, or are there already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwise.models.blocks import blocks, surround


class LaterProduct(NamedTuple):
    """The gradient of a weight [out,in] is that of the output [..,out], transposed, times the input [..,in]; it goes to
    ``weight``."""

    weight: GradientEdge
    x: Tensor
    grad: Tensor


class WeightGradients:
    """The products that were put off: into the list that is open, which one must be in every backward."""

    def __init__(self) -> None:
        self.open: list[LaterProduct] = []

    def watch(self, part: nn.Module) -> None:
        """Have linear layers of the blocks put the gradients of their weights off, from here on. A block watches
        itself, so that it does when it runs again during backward, in whatever thread that is."""
        for block in blocks(part):
            surround(block, partial(partial, _watched, self))

    @contextmanager
    def collecting(self, products: list[LaterProduct]) -> Iterator[None]:
        """During a backward, put products off into this list."""
        self.open = products
        try:
            yield
        finally:
            self.open = []

    def run(self, products: list[LaterProduct]) -> None:
        """Make the gradients that were put off, and let go of what they needed."""
        while products:
            weight, x, grad = products.pop()
            with torch.no_grad():
                made = grad.flatten(0, -2).mT @ x.flatten(0, -2)
            torch.autograd.backward([weight], [made])


def _watched(gradients: WeightGradients, forward: Callable[..., Tensor], *args: Any, **named: Any) -> Tensor:
    with _PutOff(gradients):
        return forward(*args, **named)


class _PutOff(TorchFunctionMode):
    def __init__(self, gradients: WeightGradients) -> None:
        super().__init__()
        self.gradients = gradients

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and torch.is_grad_enabled() and args[1].requires_grad:
            x, weight, *rest = args
            bias = rest[0] if rest else (kwargs or {}).get("bias")
            seen = torch.empty(0, requires_grad=True)  # autograd must come by, also where nothing before is trained
            out = _LaterLinear.apply(x, seen, _Beside(weight.detach(), get_gradient_edge(weight)), self.gradients)
            return out if bias is None else out + bias
        return func(*args, **(kwargs or {}))


class _Beside(NamedTuple):
    """A weight that autograd does not look at: its hooks are to run in the second half."""

    values: Tensor
    edge: GradientEdge


class _LaterLinear(torch.autograd.Function):
    """x [..,in] times the weight [out,in], transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor, weight: _Beside, gradients: WeightGradients) -> Tensor:
        ctx.save_for_backward(x, weight.values)
        ctx.edge, ctx.gradients = weight.edge, gradients
        return functional.linear(x, weight.values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, values = ctx.saved_tensors
        ctx.gradients.open.append(LaterProduct(ctx.edge, x.detach(), grad))
        return grad @ values if ctx.needs_input_grad[0] else None, None, None, None
