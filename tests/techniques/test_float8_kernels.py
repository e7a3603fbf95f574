"""Products in float8 as a GPU multiplies them: what the kernel is given, by the rules in torch's source, and that it is
what is emulated elsewhere. The kernel is one of our own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from shardwise.techniques import tally
from shardwise.techniques.float8 import scaled
from shardwise.techniques.float8.codes import E4M3
from shardwise.techniques.float8.scaled import Scaling, linear

SIZES = ((512, 384), (128, 384), (512, 128))
"""Out and in: four blocks of 128 and three, as scales of 128 x 128 lie in columns that are filled up to four; and one,
where a block is a row."""


def kernel(
    a: Tensor, b: Tensor, of_a: Tensor, kind_a: Any, of_b: Tensor, kind_b: Any, *rest: Any, output_dtype: torch.dtype
) -> Tensor:
    """What ``scaled_mm`` makes of a [m,k] and b [k,n], if it takes them (aten/src/ATen/native/cuda/ScaledBlas.cpp)."""
    (m, k), n = a.shape, b.shape[1]
    assert a.dtype == b.dtype == E4M3 and of_a.dtype == of_b.dtype
    assert a.stride() == (k, 1) and b.stride() == (1, k) and k % 16 == n % 16 == 0
    assert a.data_ptr() % 16 == b.data_ptr() % 16 == of_a.data_ptr() % 16 == of_b.data_ptr() % 16 == 0
    if kind_a == ScalingType.BlockWise1x32:
        assert kind_b == kind_a and set(rest) == {SwizzleType.SWIZZLE_32_4_4}
        of_rows, of_columns = (told(each, size, k // 32) for each, size in ((of_a, m), (of_b, n)))
        left, right = (x.float() * each.repeat_interleave(32, 1) for x, each in ((a, of_rows), (b.t(), of_columns)))
        return (left @ right.t()).to(output_dtype)
    assert of_a.dtype == torch.float32 and set(rest) == {SwizzleType.NO_SWIZZLE}
    if kind_a == ScalingType.RowWise:
        assert of_a.shape == (m, 1) and of_b.numel() == n and of_b.stride(1) == 1
        return ((a.float() * of_a) @ (b.float() * of_b.view(1, n))).to(output_dtype)
    assert (kind_a, kind_b) == (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
    blocks = k // 128 + -(k // 128) % 4
    assert of_a.shape == (m, k // 128) and of_a.stride() == (1, m)
    assert of_b.shape == (blocks, n // 128) and of_b.stride() == (1, blocks)
    left = a.float() * of_a.repeat_interleave(128, 1)
    right = b.float() * of_b[: k // 128].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (left @ right).to(output_dtype)


def told(scales: Tensor, rows: int, columns: int) -> Tensor:
    """The scales [rows,columns] of MX, by the rule of cuBLAS's guide: that of row r and column c is at
    r % 32 * 16 + r % 128 // 32 * 4 + c % 4 of a tile of 512; tiles of the same 128 rows follow each other."""
    across = -(-columns // 4)
    assert scales.dtype == torch.float8_e8m0fnu and scales.numel() == -(-rows // 128) * across * 512
    r, c = torch.arange(rows)[:, None], torch.arange(columns)
    return scales.float()[(r // 128 * across + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4]


def made(how: Scaling, counts: Tensor | None, sizes: tuple[int, int]) -> tuple[Tensor, ...]:
    """What a layer, or experts, make of 48 rows, the gradients of these and of the weight, and what was counted."""
    torch.manual_seed(0)
    out_size, in_size = sizes
    x = torch.randn(48, in_size).requires_grad_()
    weight = torch.randn(*(() if counts is None else counts.shape), out_size, in_size).requires_grad_()
    table = torch.zeros(1, 3, 4, dtype=torch.float64)
    with tally.counting(table):
        out = linear(x, weight, how, counts, table[0])
        out.backward(torch.randn(48, out_size))
    assert x.grad is not None and weight.grad is not None and table[0, :, 0].min() > 0
    return out, x.grad, weight.grad, table


@pytest.mark.parametrize("counts", [None, (13, 0, 32, 3), (48,)], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("scales", ["block", "row", "mx"])
def test_kernels_are_given_what_is_emulated(
    scales: str, sizes: tuple[int, int], counts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of experts with any number of rows, none among them; what is multiplied is whole 16 of them."""
    given, own = None if counts is None else torch.tensor(counts), Scaling(scales)
    right = made(own, given, sizes)
    rows = list[int]()

    def counted(a: Tensor, *rest: Any, **more: Any) -> Tensor:
        rows.append(a.shape[0])
        return kernel(a, *rest, **more)

    monkeypatch.setattr(scaled, "emulated", lambda x: False)
    monkeypatch.setattr(scaled, "scaled_mm", counted)
    found = made(own, given, sizes)
    assert rows == 2 * ([48] if counts is None else [-(-count // 16) * 16 for count in counts if count])
    for one, other in zip(found, right, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-3)
