"""A frozen layer and its adapter as one product, which compiled blocks compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from shardwise.spec.plan import Lora
from shardwise.techniques.lora.adapter import attach
from shardwise.techniques.lora.joint import two_products

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch, about its own tracing
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # likewise
]


def layer(bias: bool = False, trained: bool = False) -> nn.Linear:
    """One of 6 x 10, with an adapter of rank 3 that is not zero."""
    torch.manual_seed(0)
    made = nn.Linear(6, 10, bias=bias, dtype=torch.float64)
    made.requires_grad_(trained)
    attach(made, Lora(3, 6.0), 2.0)
    return made


def computed(module: Callable[[torch.Tensor], torch.Tensor], own: nn.Linear) -> list[torch.Tensor]:
    """The result, and the gradients of input and adapter."""
    x = torch.arange(48, dtype=torch.float64).view(2, 4, 6).cos().requires_grad_()
    out = module(x)
    trained = [own.lora_a.weight, own.lora_b.weight]  # type: ignore[union-attr]
    return [out, *torch.autograd.grad(out.square().sum(), [x, *trained])]  # type: ignore[list-item]


def compiled(own: nn.Linear) -> tuple[list[torch.Tensor], Counter[str]]:
    """The same by graphs that run as they were traced, and how often each operation is in them."""
    found = Counter[str]()

    def count(graph: GraphModule, _: Any) -> Callable[..., Any]:
        found.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    return computed(torch.compile(own, backend=aot_autograd(fw_compiler=count), fullgraph=True), own), found


def test_both_products_are_one_operation_forward_and_backward() -> None:
    """What the layer alone would have computed is nowhere in the graph: the down product is, and with the three of
    backward (the gradients at the rank, of A and of B) it makes four."""
    own = layer()
    ours, found = compiled(own)
    assert found["shardwise.two_products.default"] == 2 and found["aten.mm.default"] == 4
    torch.testing.assert_close(ours, computed(own, own))


@pytest.mark.parametrize("kind", ["bias", "trained", "replaced"])
def test_a_layer_that_computes_otherwise_stays_as_it_is(kind: str) -> None:
    own = layer(kind == "bias", kind == "trained")
    if kind == "replaced":
        plain = own.forward
        own.forward = lambda x: 3 * plain(x)  # type: ignore[method-assign]
    ours, found = compiled(own)
    assert not found["shardwise.two_products.default"]
    torch.testing.assert_close(ours, computed(own, own))


def test_the_operation_is_what_its_shape_says() -> None:
    a, u, b, v = (torch.randn(sizes, dtype=torch.float64) for sizes in [(4, 6), (6, 5), (4, 2), (2, 5)])
    torch.testing.assert_close(two_products(a, u, b, v), a @ u + b @ v)
    torch.library.opcheck(two_products, (a, u, b, v))
