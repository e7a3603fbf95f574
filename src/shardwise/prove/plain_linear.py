"""Products in float8 as the plain loop computes them: what codes stand for is found element by element, by a rule that
is written a second time here, and multiplied in the dtype of the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.models.moe import Stacked
from shardwise.models.roles import is_stacked
from shardwise.prove.regimes import STORED_BLOCK
from shardwise.prove.workload import Workload
from shardwise.spec.plan import Lora
from shardwise.techniques.nf4.fourbit import dequantise, quantise

DIGITS, LEAST, MOST = 3, -6, 448.0
"""Binary digits of e4m3 after the first, the exponent below which numbers are spaced evenly, and the largest number."""


def plain_narrow(model: nn.Module, parameters: Mapping[str, Tensor], job: Workload) -> None:
    """Have the model's layers that the job names multiply so. Of a layer with an adapter, its own weight is rounded;
    what it is given besides is the adapter's, and multiplied as it is."""
    names, size = job.narrow
    for name in names:
        layer: Any = model.get_submodule(name)
        if f"{name}.lora_a.weight" in parameters:
            given = parameters, parameters, f"{name}.", job
            rows = partial(gain, *given) if job.lora is not None and job.lora.dora else None
            layer.forward = _beside_adapter(layer, size, parameters[f"{name}.weight"].detach(), rows)
        else:
            layer.forward = _product(layer, size)


def _product(layer: nn.Linear | Stacked, size: int) -> Callable[..., Tensor]:
    def multiplied(x: Tensor, counts: Tensor | None = None) -> Tensor:
        out = _of_each(lambda x, weight: _RoundedProduct.apply(x, weight, size), x, layer.weight, counts)
        return _biased(out, layer, counts)

    return multiplied


def _beside_adapter(
    layer: nn.Linear | Stacked, size: int, frozen: Tensor, rows: Callable[[], Tensor] | None
) -> Callable[..., Tensor]:
    """The product with ``frozen``, rounded, and with what the layer's weight is besides, which is not; ``rows`` says
    what rows of both are multiplied by."""

    def multiplied(x: Tensor, counts: Tensor | None = None) -> Tensor:
        own = frozen.to(x.dtype)
        out = _of_each(lambda x, weight: _RoundedProduct.apply(x, weight, size), x, own, counts)
        if rows is not None:
            times = rows().to(x.dtype)
            out, own = out * times, own * times.unsqueeze(1)
        return _biased(out + _of_each(functional.linear, x, layer.weight - own, counts), layer, counts)

    return multiplied


def _of_each(multiply: Callable[..., Tensor], x: Tensor, weight: Tensor, counts: Tensor | None) -> Tensor:
    """Return what a layer multiplies, or each of its experts, whose rows come one's after another's."""
    if counts is None:
        return multiply(x, weight)
    each = zip(x.split(counts.tolist()), weight.chunk(len(counts)), strict=True)
    return torch.cat([multiply(*own) for own in each])


def _biased(out: Tensor, layer: nn.Linear | Stacked, counts: Tensor | None) -> Tensor:
    if layer.bias is None:
        return out
    return out + (layer.bias if counts is None else layer.bias.view(len(counts), -1).repeat_interleave(counts, 0))


def gain(held: Mapping[str, Tensor], parameters: Mapping[str, Tensor], layer: str, job: Workload) -> Tensor:
    """Return what DoRA multiplies each row of an adapted layer by."""
    return parameters[f"{layer}lora_m"] / adapted(held, layer, job).detach().norm(dim=1)


def adapted(parameters: Mapping[str, Tensor], layer: str, job: Workload) -> Tensor:
    """The weight W + scale * B A of a layer with an adapter, as one matrix."""
    assert job.lora is not None
    factor = job.lora.alpha / (job.lora.rank**0.5 if job.lora.rslora else job.lora.rank)
    count = job.spec.experts.num_experts if is_stacked(f"{layer}weight") else 1
    up, down = (parameters[f"{layer}{word}.weight"].chunk(count) for word in ("lora_b", "lora_a"))
    return parameters[f"{layer}weight"] + factor * torch.cat([b @ a for b, a in zip(up, down, strict=True)])


class _RoundedProduct(torch.autograd.Function):
    """x [..,in] times weight [out,in], transposed, both rounded; the gradient of x is that of the output, rounded,
    times the weight, rounded along its columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.size = size
        return functional.linear(rounded(x, 1, size), rounded(weight, size or 1, size))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        size = ctx.size
        turned = rounded(weight.t(), size or 1, size)
        return functional.linear(rounded(grad, 1, size), turned), grad.flatten(0, -2).t() @ x.flatten(0, -2), None


def rounded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """The matrix [..,k] with every element rounded to e4m3 times the scale of its block of so many ``rows`` and
    ``columns`` (0: all): the least power of two that leaves none of them above the largest."""
    flat = matrix.flatten(0, -2)
    wide, columns = flat.double(), columns or flat.shape[1]
    blocks = wide.reshape(wide.shape[0] // rows, rows, wide.shape[1] // columns, columns)
    most = blocks.abs().amax((1, 3), keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(torch.where(most > 0, most, MOST) / MOST)))
    unit = (blocks / scale).float().double()  # torch has no other way from fp64
    step = torch.exp2(torch.floor(torch.log2(unit.abs())).clamp(min=LEAST) - DIGITS)
    return (torch.round(unit / step) * step * scale).view(matrix.shape).to(matrix.dtype)


def as_stored(matrix: Tensor, of: Lora) -> Tensor:
    """The matrix that 4 bits, or float8, keep of this one."""
    if of.nf4:
        return dequantise(*quantise(matrix), matrix.dtype)
    rows, columns = matrix.shape
    filled = functional.pad(matrix, (0, -columns % STORED_BLOCK, 0, -rows % STORED_BLOCK))
    return rounded(filled, STORED_BLOCK, STORED_BLOCK)[:rows, :columns]
