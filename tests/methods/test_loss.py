"""The chunked loss against torch's cross-entropy over whole logits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.data.micro_batch import MicroBatch
from shardwise.methods import loss as loss_module
from shardwise.methods import pretrain
from shardwise.methods.loss import Output, linear_cross_entropy, token_losses
from shardwise.models.attention import MaskSpec
from shardwise.runtime import passes
from shardwise.spec.cluster import joins_products
from tests.models.llama import random_model, relative, tokens
from tests.models.test_decoder import SPEC


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(3, 7, 16, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(29, 16, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, 29, (3, 7))
    labels[0, :3] = labels[2] = -100
    return hidden, weight, labels


def reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.mT).flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("chunk_tokens", [1, 4, 7, 20, 21, 1000])
def test_loss_and_gradients_are_those_of_cross_entropy(chunk_tokens: int) -> None:
    """fp64: only rounding may differ. The factor is not one, as accumulation and loss scaling need."""
    hidden, weight, labels = inputs()
    loss, expected = (
        linear_cross_entropy(hidden, Output(weight), labels, chunk_tokens),
        reference(hidden, weight, labels),
    )
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    grads = torch.autograd.grad(loss * 0.37, (hidden, weight))
    for ours, theirs in zip(grads, torch.autograd.grad(expected * 0.37, (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 20, 1000])
def test_capped_logits(chunk_tokens: int, dtype: torch.dtype) -> None:
    """Against cross-entropy over cap * tanh(logits / cap); the cap is where many logits are. bf16: to its rounding."""
    cap = 3.0
    exact, labels = inputs()[:2], inputs()[2]
    expected = F.cross_entropy(
        (torch.tanh(exact[0] @ exact[1].mT / cap) * cap).flatten(0, 1), labels.flatten(), reduction="sum"
    )
    hidden, weight, _ = inputs(dtype)
    loss = linear_cross_entropy(hidden, Output(weight, cap), labels, chunk_tokens)
    tolerance = 1e-12 if dtype == torch.float64 else 0.02
    assert relative(loss.double(), expected) < tolerance
    assert relative(loss.double(), reference(*exact, labels)) > 0.1
    loss.backward()
    for ours, theirs in zip((hidden, weight), torch.autograd.grad(expected, exact), strict=True):
        assert relative(ours.grad.double(), theirs) < tolerance
    losses = token_losses(hidden, Output(weight, cap), labels, chunk_tokens)
    torch.testing.assert_close(losses.sum().double(), loss.detach().double(), rtol=1e-6, atol=0)


def test_narrow_products_are_added_to_a_wide_sum_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, whose operation stands here in fp32: the gradient of the weight is nearer to the exact one than by
    way of bf16 products, of which each is rounded."""
    hidden, weight, labels = inputs()
    exact = torch.autograd.grad(reference(hidden.bfloat16().double(), weight.bfloat16().double(), labels), weight)[0]
    calls: list[torch.dtype] = []

    def addmm(total: Tensor, left: Tensor, right: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert out is total and left.dtype == right.dtype == torch.bfloat16 and out.dtype == out_dtype
        calls.append(out_dtype)
        return out.add_(left.float() @ right.float())

    errors = []
    for joined in (False, True):
        monkeypatch.setattr(loss_module, "joins_products", lambda device, joined=joined: joined)
        monkeypatch.setattr(torch, "addmm", addmm)
        narrow = (inputs(torch.bfloat16)[0].detach(), weight.detach().float().bfloat16().float().requires_grad_())
        linear_cross_entropy(narrow[0], Output(narrow[1]), labels, 4).backward()
        errors.append(relative(narrow[1].grad.double(), exact))
    assert calls == [torch.float32] * 6 and errors[1] < errors[0] < 0.02


def test_torch_has_the_operation_that_adds_a_product_to_a_wide_sum() -> None:
    """For CUDA alone, in torch 2.11 and 2.13: the sum may have the type of the result."""
    names = ("self", "mat1", "mat2", "out_dtype", "beta", "alpha", "out")
    assert tuple(argument.name for argument in torch.ops.aten.addmm.dtype_out._schema.arguments) == names
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::addmm.dtype", "CPU")
    assert joins_products("cuda") and not joins_products("cpu")


def test_gradients_against_finite_differences() -> None:
    """gradcheck propagates one loss several times, which this one refuses; so central differences along a direction,
    whose error is about 1e-10 for a step of 1e-5."""
    hidden, weight, labels = inputs()
    linear_cross_entropy(hidden, Output(weight), labels, 5).backward()
    for tensor, other in ((hidden, weight), (weight, hidden)):
        direction = torch.randn_like(tensor)
        slope = float((tensor.grad * direction).sum())
        ends = []
        for step in (1e-5, -1e-5):
            moved = (tensor + step * direction).detach()
            pair = (moved, other.detach()) if tensor is hidden else (other.detach(), moved)
            ends.append(float(linear_cross_entropy(pair[0], Output(pair[1]), labels, 5)))
        assert abs((ends[0] - ends[1]) / 2e-5 - slope) < 1e-7 * abs(slope)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_gets_no_gradient(frozen: int) -> None:
    hidden, weight, labels = inputs()
    trained = (hidden, weight)[1 - frozen]
    (hidden, weight)[frozen].requires_grad_(False)
    linear_cross_entropy(hidden, Output(weight), labels, 4).backward()
    (expected,) = torch.autograd.grad(reference(hidden, weight, labels), trained)
    torch.testing.assert_close(trained.grad, expected)
    assert (hidden, weight)[frozen].grad is None


def test_bf16_sums_over_chunks_in_fp32() -> None:
    """The weight's gradient over many chunks is as near as over one: within bf16's rounding of the logits' slopes."""
    exact = inputs()
    expected = torch.autograd.grad(reference(*exact), exact[:2])
    for chunk_tokens in (1, 1000):
        hidden, weight, labels = inputs(torch.bfloat16)
        loss = linear_cross_entropy(hidden, Output(weight), labels, chunk_tokens)
        assert loss.dtype == torch.float32
        loss.backward()
        assert relative(hidden.grad.double(), expected[0]) < 0.02 and relative(weight.grad.double(), expected[1]) < 0.02


def test_a_weight_in_fp32_gets_a_gradient_in_fp32() -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    master = weight.detach().float().requires_grad_()
    linear_cross_entropy(hidden, Output(master), labels, 4).backward()
    assert master.grad.dtype == torch.float32 and hidden.grad.dtype == torch.bfloat16


def test_nothing_supervised_is_a_loss_of_zero() -> None:
    """A micro-batch may hold no label; cross_entropy's mean would be nan."""
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden, Output(weight), torch.full_like(labels, -100), 4)
    loss.backward()
    assert float(loss.detach()) == 0 and not hidden.grad.any() and not weight.grad.any()


def test_a_loss_is_propagated_once() -> None:
    """Backward scales the gradients in place: a second time is an error, not a wrong number."""
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden, Output(weight), labels, 4)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("chunk_tokens", [4, 1000])
def test_token_losses(chunk_tokens: int) -> None:
    hidden, weight, labels = inputs()
    expected = F.cross_entropy((hidden @ weight.mT).flatten(0, 1), labels.flatten(), reduction="none").view(3, 7)
    losses = token_losses(hidden, Output(weight), labels, chunk_tokens)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-13, atol=1e-14)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, Output(weight), labels, chunk_tokens), losses.sum())


def test_logits_of_all_tokens_never_exist() -> None:
    """No allocation of a forward and backward pass holds tokens x vocabulary elements."""
    hidden = torch.randn(512, 16, requires_grad=True)
    weight = torch.randn(1000, 16, requires_grad=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        linear_cross_entropy(hidden, Output(weight), torch.zeros(512, dtype=torch.int64), 32).backward()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest <= 3 * 32 * 1000 * 4 + 1000 * 16 * 4


@pytest.mark.parametrize("documents", [None, torch.tensor([0, 15, 40, 80], dtype=torch.int32)])
def test_pretraining_loss_is_the_sum_over_the_denominator(documents: Tensor | None) -> None:
    """Through the whole model, documents masked: the same as each document alone."""
    model = random_model(SPEC, dtype=torch.float64)
    ids, positions = tokens(SPEC.vocab_size)
    lengths = [40, 40] if documents is None else documents.diff().tolist()
    labels = torch.cat([torch.cat([piece[1:], piece.new_tensor([-100])]) for piece in ids.flatten().split(lengths)])
    positions = torch.cat([torch.arange(n) for n in lengths]).view(2, 40)
    batch = MicroBatch(ids, labels.view(2, 40), positions, documents, max(lengths))
    loss = passes.forward([model], batch, partial(pretrain.finish, denominator=123.0, chunk_tokens=32))
    expected = torch.zeros((), dtype=torch.float64)
    for piece, label in zip(ids.flatten().split(lengths), labels.split(lengths), strict=True):
        alone = model(piece[None], torch.arange(len(piece))[None], MaskSpec())
        expected = expected + F.cross_entropy(alone[0], label, reduction="sum") / 123.0
    torch.testing.assert_close(loss.value, expected, rtol=1e-12, atol=0)
    losses = passes.infer([model], batch, partial(loss_module.score, chunk_tokens=32))
    torch.testing.assert_close(losses.sum() / 123.0, expected, rtol=1e-12, atol=0)
    assert not losses.requires_grad and bool((losses[batch.labels == -100] == 0).all())
