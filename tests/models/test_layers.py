"""The layers beside attention: what their operations read and write, and torch's own norm on GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._dynamo.backends.debugging import aot_eager
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.models import layers
from shardwise.models.attention import MaskSpec
from shardwise.models.config import model_spec
from shardwise.models.decoder import Decoder
from shardwise.models.layers import RMSNorm
from shardwise.models.rotary import rotary_tables
from shardwise.spec.plan import Plan, Precision
from shardwise.techniques import precision

SPEC = model_spec("layers", 64, 32, 64, 2, 4, 2, 8)
VIEWS = {"view", "_unsafe_view", "t", "transpose", "unbind", "unsqueeze", "select", "detach", "expand", "alias"}


class Counted(TorchDispatchMode):
    """Operations that compute, by name, and the bytes of all that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket._qualified_op_name.partition("::")[2]
        if name not in VIEWS:
            self.names[name] += 1
            self.bytes += sum(x.nbytes for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor))
        return out

    @property
    def casts(self) -> int:
        return self.names["_to_copy"]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The norm takes the way of a GPU. Its operators have no kernels for a CPU: what torch says they are made of stands
    in for them."""
    monkeypatch.setattr(layers, "FUSED_NORM", ("cpu",))
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in ("_fused_rms_norm", "_fused_rms_norm_backward"):
            library.impl(name, decomposition_table[getattr(torch.ops.aten, name).default], "CPU")
        yield


def passed(norm: RMSNorm, x: Tensor) -> tuple[Tensor, ...]:
    """What a norm makes of x, and the gradients of its squares' sum."""
    x = x.clone().requires_grad_()
    out = norm(x)
    return out.detach(), *torch.autograd.grad(out.square().sum(), (x, norm.weight))


def norm_of(size: int, plus_one: bool) -> RMSNorm:
    norm = RMSNorm(size, 1e-5, plus_one)
    torch.nn.init.normal_(norm.weight)
    return norm


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plus_one", [False, True])
def test_the_norm_of_a_gpu_is_that_of_a_cpu(request: pytest.FixtureRequest, plus_one: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm, x = norm_of(48, plus_one).to(dtype), torch.randn(2, 7, 48, dtype=dtype)
    expected = passed(norm, x)
    request.getfixturevalue("on_a_gpu")
    with Counted() as counted:
        found = passed(norm, x)
    assert counted.names["_fused_rms_norm"] == counted.names["_fused_rms_norm_backward"] == 1
    few = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert float((one - other).double().abs().max() / other.double().abs().max()) < few


def bytes_an_element(plus_one: bool) -> float:
    norm, x = norm_of(4096, plus_one), torch.randn(2, 256, 4096, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    with Counted() as counted:
        norm(x).backward(grad)
    return counted.bytes / x.numel()


@pytest.mark.usefixtures("on_a_gpu")
def test_on_a_gpu_a_norm_reads_and_writes_each_element_once() -> None:
    """bf16, 2 bytes an element: x and the output; x, the gradient and its own; Gemma's converts each to fp32 first."""
    assert bytes_an_element(plus_one=False) < 10.5
    assert bytes_an_element(plus_one=True) < 60


def block_passes() -> tuple[Counted, Counted]:
    """Forward and backward of a block of fp32 weights in bf16, with no compiler."""
    model = Decoder(SPEC)
    precision.apply([model], Plan(precision=Precision("bf16")), None)
    positions = torch.arange(16).expand(2, 16)
    hidden = torch.randn(2, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    rotary = rotary_tables(SPEC, positions, torch.bfloat16)
    with Counted() as forward:
        out = model.layers[0](hidden, rotary, MaskSpec())
    grad = torch.randn_like(out)
    with Counted() as backward:
        out.backward(grad)
    return forward, backward


def test_operations_of_a_block_on_a_cpu() -> None:
    """Casts of nine weights and their gradients; in each of two norms two in forward, and four in backward."""
    forward, backward = block_passes()
    assert (forward.casts, backward.casts) == (9 + 4, 9 + 8)
    assert forward.names.total() <= 45 and backward.names.total() <= 66, (forward.names, backward.names)


@pytest.mark.usefixtures("on_a_gpu")
def test_operations_of_a_block_on_a_gpu() -> None:
    """Nothing is cast but weights and their gradients."""
    forward, backward = block_passes()
    assert (forward.casts, backward.casts) == (9, 9)
    assert forward.names.total() <= 29 and backward.names.total() <= 42, (forward.names, backward.names)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about its own tracing
@pytest.mark.usefixtures("on_a_gpu")
def test_a_compiled_norm_is_left_to_the_compiler() -> None:
    """In its parts, so that it is joined with what stands around it."""
    torch._dynamo.reset()
    graphs = []

    def kept(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    norm, x = norm_of(48, plus_one=False), torch.randn(2, 7, 48)
    expected, found = passed(norm, x), passed(torch.compile(norm, fullgraph=True, backend=kept), x)
    assert len(graphs) == 1 and "_fused_rms_norm" not in graphs[0].print_readable(print_output=False)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, expected, strict=True))


class Made(TorchFunctionMode):
    """Refuses what more than one call returned, or was given to one."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.seen: list[Tensor] = list(given)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.last_is_new = not any(out is one for one in self.seen)
        self.seen += [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, weight: layers._RMSNormFunction.forward(x, weight, 1e-5, False)[0],
        lambda x, weight: layers._RMSNormFunction.forward(x, weight, 1e-5, True)[0],
        lambda x, _: layers._SwiGLU.forward(x, x.clone()),
        lambda x, _: layers._GeGLU.forward(x, x.clone()),
        lambda x, _: layers._ClampedSwiGLU.forward(x, x.clone()),
        lambda x, _: layers._Rotate.forward(x, torch.ones(7, 1, 24), torch.ones(7, 1, 24), False),
    ],
    ids=["norm", "norm plus one", "swiglu", "geglu", "clamped", "rotate"],
)
def test_the_compiler_is_given_an_object_of_its_own(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    """Torch 2.11 computes wrong gradients of a function whose forward returns an object that two of its
    operations returned: what one in place wrote to, or a cast did not need to cast."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x, weight = torch.randn(2, 7, 3, 48).to(dtype), torch.randn(48).to(dtype)
    with Made(x, weight) as made:
        function(x, weight)
    assert made.last_is_new
