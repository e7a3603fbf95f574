"""Kernels and blockwise attention against a dense softmax in fp64."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.models import attention as module
from shardwise.models import blockwise, flash
from shardwise.models.attention import MaskSpec

B, H, HK, S, E = 2, 6, 2, 40, 8
BOUNDS = [0, 10, 11, 40, 47, 80]
DOCUMENTS = torch.tensor(BOUNDS, dtype=torch.int32)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks a row, the last one short."""
    monkeypatch.setattr(blockwise, "BLOCK", 16)


def inputs(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(B, S, heads, E, dtype=dtype).transpose(1, 2).requires_grad_() for heads in (H, HK, HK)]


def dense(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> tuple[Tensor, Tensor]:
    """The definition, with all S x S scores."""
    k, v = (x.repeat_interleave(H // HK, 1) for x in (k, v))
    positions = torch.arange(S).expand(B, S) if mask.positions is None else mask.positions
    distance = (positions[:, :, None] - positions[:, None, :])[:, None]
    seen = torch.ones(B, 1, S, S, dtype=torch.bool)
    if mask.causal:
        seen &= distance >= 0
    if mask.window is not None:
        seen &= distance.abs() < mask.window
    if mask.documents is not None:
        number = torch.repeat_interleave(torch.arange(len(BOUNDS) - 1), mask.documents.diff()).view(B, S)
        seen &= (number[:, :, None] == number[:, None, :])[:, None]
    scores = q @ k.mT * (E**-0.5 if mask.scale is None else mask.scale)
    if mask.soft_cap is not None:
        scores = mask.soft_cap * torch.tanh(scores / mask.soft_cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if mask.sinks is None:
        return scores.softmax(-1) @ v, scores.logsumexp(-1)
    whole = torch.cat([scores, mask.sinks.view(1, H, 1, 1).expand(B, H, S, 1)], -1)
    return whole.softmax(-1)[..., :S] @ v, whole.logsumexp(-1)


def run(q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec) -> tuple[Tensor, Tensor]:
    return module.Attention.inner(None, q, k, v, mask)  # type: ignore[arg-type]


SHUFFLED = torch.stack([torch.randperm(S, generator=torch.Generator().manual_seed(1)) for _ in range(B)])
SINKS = torch.randn(H, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
MASKS = {
    "causal": MaskSpec(),
    "full": MaskSpec(causal=False),
    "documents": MaskSpec(documents=DOCUMENTS, longest=33),
    "full documents": MaskSpec(causal=False, documents=DOCUMENTS, longest=33),
    "window": MaskSpec(window=7),
    "full window": MaskSpec(causal=False, window=7),
    "short window": MaskSpec(window=2),
    "soft cap": MaskSpec(soft_cap=1.5),
    "scale": MaskSpec(scale=0.6),
    "scale in documents": MaskSpec(documents=DOCUMENTS, longest=33, scale=0.6),
    "sinks": MaskSpec(sinks=SINKS),
    "positions": MaskSpec(positions=SHUFFLED),
    "all": MaskSpec(window=9, documents=DOCUMENTS, longest=33, soft_cap=2.0, sinks=SINKS, scale=0.6),
}


@pytest.mark.parametrize("name", MASKS)
def test_attention_is_the_dense_softmax(name: str) -> None:
    """Output, lse and gradients in fp64: only rounding may differ."""
    mask = MASKS[name]
    if mask.sinks is not None:
        mask = replace(mask, sinks=mask.sinks.clone().requires_grad_())
    wanted = [x for x in (*inputs(), mask.sinks) if x is not None]
    q, k, v = wanted[:3]
    out, lse = run(q, k, v, mask)
    expected, expected_lse = dense(q, k, v, mask)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-10, atol=1e-11)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, wanted, grad)
    for ours, reference in zip(grads, torch.autograd.grad(expected, wanted, grad), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_the_fallback_is_the_kernel(dtype: torch.dtype, documents: Tensor | None) -> None:
    """To rounding: the kernel rounds bf16 probabilities before the second product, the fallback keeps fp32."""
    rule = blockwise.Rule(documents, None, None, True, None, 33, None)
    q, k, v = (x.detach() for x in inputs(dtype))
    results = []
    for path in (flash, blockwise):
        out, lse = path.forward(q, k, v, rule)
        grads = path.backward(torch.ones_like(out), blockwise.Saved(q, k, v, out, lse), rule)
        results.append([x.double() for x in (out, lse, *grads)])
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for kernel, fallback in zip(*results, strict=True):
        assert (kernel - fallback).norm() < tolerance * (1 + fallback.norm())


def test_a_row_that_sees_nothing_is_zero_and_has_no_gradient() -> None:
    """Query 0 stands before every key: positions of a sequence shard can do that."""
    rule = blockwise.Rule(None, None, torch.zeros(1, 4, dtype=torch.int64), True, 0, 4, None)
    q, k, v = (torch.randn(1, heads, 4, E) for heads in (H, HK, HK))
    out, lse = blockwise.forward(q, k, v, rule)
    grads = blockwise.backward(torch.ones_like(out), blockwise.Saved(q, k, v, out, lse), rule)
    assert not out.any() and bool((lse == -torch.inf).all()) and not any(bool(g.any()) for g in grads)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", ["causal", "documents", "all"])
def test_gradcheck(name: str) -> None:
    q, k, v = (x.detach()[:1, :, :6].clone().requires_grad_() for x in inputs())
    mask = MASKS[name]
    if mask.documents is not None:
        mask = replace(mask, documents=torch.tensor([0, 2, 6], dtype=torch.int32), longest=4)
    if mask.sinks is None:
        assert torch.autograd.gradcheck(lambda q, k, v: run(q, k, v, mask)[0], (q, k, v))
        return
    sinks = mask.sinks.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k, v, s: run(q, k, v, replace(mask, sinks=s))[0], (q, k, v, sinks))


@pytest.mark.parametrize("name", ["causal", "documents", "all"])
def test_the_operation_is_declared_truly(name: str) -> None:
    """Schema, fake shapes and strides, and autograd registration: torch's own check."""
    mask = MASKS[name]
    q, k, v = inputs()
    settings = (mask.causal, mask.window, mask.longest, mask.soft_cap, mask.scale)
    torch.library.opcheck(module.attention, (q, k, v, mask.documents, mask.sinks, mask.positions, *settings))


@pytest.mark.parametrize("varied", ["longest", "number", "both"])
def test_packed_batches_share_two_graphs(varied: str) -> None:
    """Eleven batches, forward and backward: the first is compiled for its numbers, the second for any."""
    torch._dynamo.reset()
    graphs = []

    def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(run, fullgraph=True, backend=counted)
    q, k, v = inputs()
    for n in range(11):
        bounds = [0, 30, 40] if varied == "longest" else [0, 20, *range(21, 21 + n), 40]
        bounds[1] -= n if varied != "number" else 0
        mask = MaskSpec(documents=torch.tensor([*bounds, 80], dtype=torch.int32), longest=40)
        mask = replace(mask, longest=40 if varied == "number" else 40 - n)
        out, _ = compiled(q, k, v, mask)
        assert torch.equal(out, run(q, k, v, mask)[0])
        torch.autograd.grad(out.sum(), (q, k, v))
    assert len(graphs) == 2


@pytest.mark.parametrize("name", ["causal", "documents", "window"])
def test_a_gradient_of_any_strides(name: str) -> None:
    """The gradient of a sum is one number, expanded."""
    tensors = inputs()
    grads = torch.autograd.grad(run(*tensors, MASKS[name])[0].sum(), tensors)
    for ours, reference in zip(grads, torch.autograd.grad(dense(*tensors, MASKS[name])[0].sum(), tensors), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-10)


def test_lse_takes_no_gradient() -> None:
    assert not run(*inputs(), MaskSpec())[1].requires_grad


def test_no_gradient_of_lse_is_made() -> None:
    """Autograd would make zeros for it, 4 bytes a token and head, for a backward that does not read them."""

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made.append(str(func))
            return func(*args, **(kwargs or {}))

    made: list[str] = []
    q, k, v = (torch.randn(1, heads, 8, 16, requires_grad=True) for heads in (4, 2, 2))
    out, _ = run(q, k, v, MaskSpec())
    with Made():
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert made[-1] == "shardwise.attention_backward.default" and "aten.zeros.default" not in made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_backward_of_narrow_documents_is_that_of_fp32_rounded(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, whatever the number of heads at a time."""
    mask = MaskSpec(documents=DOCUMENTS, longest=33)
    narrow = [x.detach().to(dtype).requires_grad_() for x in inputs(torch.float32)]
    grad = torch.randn(B, H, S, E).to(dtype)
    out, lse = run(*narrow, mask)
    rule = blockwise.Rule(DOCUMENTS, None, None, True, None, 33, None)
    saved = blockwise.Saved(*(x.detach() for x in (*narrow, out, lse)))
    whole = flash.backward(grad, saved, rule)
    monkeypatch.setattr(flash, "WIDE_NUMBERS", 1)
    pieces = flash.backward(grad, saved, rule)
    wide = blockwise.Saved(*(x.float() for x in saved))
    expected = flash.backward(grad.float(), wide, rule)
    for found, piecewise, right in zip(whole, pieces, expected, strict=True):
        assert torch.equal(found, piecewise) and torch.equal(found, right.to(dtype))


@pytest.mark.matrix
@pytest.mark.parametrize(("dtype", "products"), [(torch.bfloat16, "highest"), (torch.float32, "medium")])
def test_documents_of_new_lengths_take_no_more_memory(dtype: torch.dtype, products: str) -> None:
    """200 steps, each with a length that none had before, through a process of its own: 0.5 GiB once."""
    code = f"""
import torch
from shardwise.models import attention
from shardwise.runtime.metrics.measure import resident_bytes
torch.set_num_threads(1)
torch.set_float32_matmul_precision({products!r})
for length in range(60, 260):
    q, k, v = (torch.randn(1, 320, heads, 32).to({dtype}).transpose(1, 2).requires_grad_() for heads in (2, 1, 1))
    documents = torch.tensor([0, length, 320], dtype=torch.int32)
    out, _ = attention.attention(q, k, v, documents, None, None, True, None, length, None, None)
    out.sum().backward()
    if length == 80:
        begun = resident_bytes()
print(resident_bytes() - begun, torch.get_float32_matmul_precision())
"""
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    grown_bytes, setting = ended.stdout.split()
    assert int(grown_bytes) < 40 * 2**20 and setting == products
