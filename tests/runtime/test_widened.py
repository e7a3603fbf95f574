"""bf16 computed in fp32 on a CPU: the same numbers as float64 to half a step of bf16, at torch's own seams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from shardwise.runtime import own, widened
from shardwise.runtime.loop import train
from shardwise.runtime.measure import highest_bytes
from shardwise.runtime.widened import widen_bf16
from shardwise.spec.plan import Plan, Precision
from tests.runtime import small_run

HALF_A_STEP = 2.0**-8
"""bf16 keeps 8 bits: rounding once errs by at most this share of the value. Sums in fp32 add some 1e-6."""


@pytest.fixture
def on() -> Iterator[None]:
    widen_bf16(True)
    yield
    widen_bf16(False)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rounded_once(found: Tensor, right: Tensor) -> bool:
    """Within half a step of each value, beside what fp32 leaves of sums that cancel."""
    error = (found.double() - right).abs()
    return found.dtype == torch.bfloat16 and bool((error <= 1.01 * HALF_A_STEP * right.abs() + 1e-4).all())


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("limit", [2**21, 1000, 1])
def test_products_are_rounded_once(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the pieces; strided operands, a place to write to, and something to add."""
    monkeypatch.setattr(widened, "WIDENED_NUMBERS", limit)
    left, right, bias = numbers(37, 50), numbers(23, 50, seed=1).mT, numbers(23, seed=2)
    exact = left.double() @ right.double()
    assert rounded_once(left @ right, exact)
    place = torch.zeros(40, 23, dtype=torch.bfloat16)
    torch.mm(left, right, out=place[:37])
    assert torch.equal(place[:37], left @ right) and not place[37:].any()
    assert rounded_once(torch.addmm(bias, left, right), exact + bias.double())
    assert torch.equal(functional.linear(left, right.mT, bias), torch.addmm(bias, left, right))


@pytest.mark.usefixtures("on")
def test_gradients_pass_through_them() -> None:
    layer = torch.nn.Linear(48, 24).bfloat16()
    x = numbers(2, 16, 48).requires_grad_()
    layer(x).backward(numbers(2, 16, 24, seed=1))
    exact = torch.nn.Linear(48, 24).double()
    exact.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    y = x.detach().double().requires_grad_()
    exact(y).backward(numbers(2, 16, 24, seed=1).double())
    for found, right in ((x.grad, y.grad), (layer.weight.grad, exact.weight.grad)):
        assert found is not None and right is not None and rounded_once(found, right)


def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each product that is widened from now on."""
    made: list[int] = []
    multiply = widened.multiply

    def counted(*given: Any) -> Tensor:
        made.append(1)
        return multiply(*given)

    monkeypatch.setattr(widened, "multiply", counted)
    return made


@pytest.mark.usefixtures("on")
def test_what_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other types, few rows, factors, a place of another type, nothing to sum over; wrong shapes fail as they did."""
    made = calls(monkeypatch)
    left, right = numbers(32, 8), numbers(8, 32, seed=1)
    exact = left.double() @ right.double()
    assert torch.allclose(left.float() @ right.float(), exact.float(), atol=1e-5)
    assert torch.equal(left.double() @ right.double(), exact)
    assert rounded_once(left[:15] @ right, exact[:15])
    twice = torch.addmm(numbers(32, seed=2), left, right, beta=0, alpha=2)
    assert torch.allclose(twice.double(), 2 * exact, rtol=2 * HALF_A_STEP, atol=1e-3)
    assert (numbers(32, 0) @ numbers(0, 32)).eq(0).all()
    with torch.autocast("cpu", torch.bfloat16):
        torch.mm(left, right, out=torch.zeros(32, 32, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.addmm(torch.ones(32), left, right)
    assert not made
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        left @ left
    with pytest.raises(RuntimeError, match="self must be a matrix"):
        torch.mm(left[0], right)
    assert torch.equal(torch.mm(left, right, out=torch.empty(0, dtype=torch.bfloat16)), left @ right)
    assert len(made) == 1


def attended(heads: int, shared: int, dtype: torch.dtype, **settings: Any) -> list[Tensor]:
    """Output and gradients of attention of the same numbers in ``dtype``."""
    q, k, v, grad = (
        numbers(2, count, 70, 16, seed=seed).to(dtype).requires_grad_()
        for seed, count in enumerate((heads, shared, shared, heads))
    )
    out = functional.scaled_dot_product_attention(q, k, v, enable_gqa=heads != shared, **settings)
    out.backward(grad.detach())
    return [x.detach() for x in (out, q.grad, k.grad, v.grad)]  # type: ignore[union-attr]


@pytest.mark.parametrize("shared", [4, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_errs_less_than_torchs_own(shared: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its inner products are not rounded to bf16 on the way; a piece of heads at a time, it is the same to the bit."""
    exact = attended(4, shared, torch.float64, is_causal=causal)
    torchs = attended(4, shared, torch.bfloat16, is_causal=causal)
    widen_bf16(True)
    try:
        whole = attended(4, shared, torch.bfloat16, is_causal=causal)
        monkeypatch.setattr(widened, "WIDENED_NUMBERS", 2500)  # two heads of 70 x 16
        pieces = attended(4, shared, torch.bfloat16, is_causal=causal)
        masked = attended(4, 4, torch.bfloat16, attn_mask=torch.ones(70, 70, dtype=torch.bool).tril())
    finally:
        widen_bf16(False)
    for right, theirs, found, piecewise in zip(exact, torchs, whole, pieces, strict=True):
        assert found.dtype == torch.bfloat16 and torch.equal(found, piecewise)
        assert float((found - right).norm()) <= 1.01 * float((theirs - right).norm())
    right = attended(4, 4, torch.float64, is_causal=True)
    assert all(torch.allclose(a.double(), b, atol=0.05) for a, b in zip(masked, right, strict=True))  # torch's own


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("shared", [4, 2])
@pytest.mark.parametrize("limit", [2**21, 2500])
def test_attention_is_that_of_fp32_rounded(shared: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, forward and backward, keys and values shared by queries or not."""
    monkeypatch.setattr(widened, "WIDENED_NUMBERS", limit)
    forward = partial(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, scale=0.3)
    backward = partial(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, scale=0.3)
    heads = enumerate((4, shared, shared, 4))
    q, k, v, grad = (numbers(2, 70, count, 16, seed=seed).transpose(1, 2) for seed, count in heads)
    wide = [x.float() for x in (q, k, v)]
    (out, lse), (right, right_lse) = forward(q, k, v, 0.0, True), forward(*wide, 0.0, True)
    assert torch.equal(out, right.bfloat16()) and torch.equal(lse, right_lse)
    found = backward(grad, q, k, v, out, lse, 0.0, True)
    expected = backward(grad.float(), *wide, out.float(), lse, 0.0, True)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(found, expected, strict=True))


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("shared", [4, 2])
def test_results_are_laid_out_as_torch_says(turned: bool, shared: int) -> None:
    """Compiled graphs take the strides of operations on the meta device for granted."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    tensors = [
        numbers(2, 70, heads, 16, seed=seed).transpose(1, 2) for seed, heads in enumerate((4, shared, shared, 4))
    ]
    q, k, v, grad = tensors if turned else [x.contiguous() for x in tensors]
    there = [x.to("meta") for x in (q, k, v)]
    (out, lse), (meta_out, meta_lse) = forward(q, k, v, 0.0, True), forward(*there, 0.0, True)
    assert (out.stride(), lse.stride()) == (meta_out.stride(), meta_lse.stride())
    found = backward(grad, q, k, v, out, lse, 0.0, True)
    meta = backward(grad.to("meta"), *there, meta_out, meta_lse, 0.0, True)
    assert [x.stride() for x in found] == [x.stride() for x in meta]


def test_afterwards_torch_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    made = calls(monkeypatch)
    left, right = numbers(64, 300), numbers(300, 64, seed=1)
    before = left @ right, attended(2, 2, torch.bfloat16)
    for _ in range(2):
        widen_bf16(True)
        widen_bf16(True)
        left @ right
        widen_bf16(False)
        widen_bf16(False)
    assert torch.equal(left @ right, before[0]) and len(made) == 2
    assert all(torch.equal(a, b) for a, b in zip(attended(2, 2, torch.bfloat16), before[1], strict=True))


@pytest.mark.usefixtures("on")
def test_what_stands_in_fp32_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pieces for a product, eight for attention's backward."""
    monkeypatch.setattr(widened, "WIDENED_NUMBERS", 2**14)
    left, right = numbers(1024, 128), numbers(128, 1024, seed=1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        left @ right
    assert 2 * 2**20 < highest_bytes(profiler) <= 2 * 2**20 + 3 * 4 * 2**14
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for shared, group in ((8, 1), (1, 8)):
        q, k, v, grad = (numbers(2, heads, 256, 64, seed=seed) for seed, heads in enumerate((8, shared, shared, 8)))
        out, lse = forward(q, k, v, 0.0, True)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            backward(grad, q, k, v, out, lse, 0.0, True)
        kernels_own = 2**19
        results, piece = q.nbytes + 2 * k.nbytes, group * 256 * 64
        assert highest_bytes(profiler) <= results + 8 * 4 * piece + kernels_own


def test_a_run_of_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its losses are those of torch's own products but for rounding; its header and run.json say how they are made,
    and after it torch is as it was."""
    losses = []
    for matmul in ("highest", "widened"):
        made = small_run.recipe(tmp_path, matmul, train={"max_steps": 6})
        plan = small_run.plan()
        plan = replace(plan, precision=replace(plan.precision, compute="bf16", matmul=matmul))  # type: ignore[arg-type]
        train(made, plan)
        losses.append([row[2] for row in small_run.numbers(small_run.directory(made))])
        assert json.loads((small_run.directory(made) / "run.json").read_text())["matmul"] == matmul
        products = "bf16 products: widened" if matmul == "widened" else "fp32 products: highest"
        assert f"· {products} (the plan)" in capsys.readouterr().out
        assert not widened._registered
    assert losses[1] == pytest.approx(losses[0], rel=5e-3) and losses[1] != losses[0]


def test_a_loop_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 where the CPU has no instructions for it; for the length of the world."""
    made = calls(monkeypatch)
    for able, expected in ((True, 0), (False, 1)):
        monkeypatch.setattr(own, "computes_bf16", lambda able=able: able)
        plan = own.plan("ddp", compute="bf16")
        assert own.plan("ddp").precision.matmul == "highest"
        with own.world(plan):
            numbers(32, 32) @ numbers(32, 32)
        assert len(made) == expected
        numbers(32, 32) @ numbers(32, 32)
        assert len(made) == expected
    assert plan == replace(Plan(), precision=Precision("bf16", matmul="widened"), layout=plan.layout)
