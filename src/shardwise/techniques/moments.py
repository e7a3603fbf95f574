"""AdamW whose moments are kept in 8 bits (Dettmers et al., arXiv 2110.02861).

A matrix of at least ``LEAST`` elements keeps each moment as one byte an element and one fp32 scale, the largest size,
for every ``BLOCK`` columns of a row. The byte names a value of a table that is dense where moments are many: seven
decades, more values in the higher ones. Of the second moment it is the root that is kept, which is what is divided by,
and one that is not zero never becomes zero: in a block of gradients of very different sizes the small ones would else
be divided by nothing. Blocks lie within rows, so a shard of rows has the same bytes and scales whatever the layout, and
a checkpoint reshards exactly. Smaller parameters keep fp32 moments. Plain torch, no compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.techniques.quantised import BLOCK, quantised

CHUNK = 2**22
"""Elements that are wide at one time."""


@cache
def table(signed: bool) -> Tensor:
    """256 values in [-1, 1], or in [0, 1], ascending: decade d of seven holds 2^d (unsigned 2^(d+1)) values evenly."""
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        values += middles + ([-value for value in middles] if signed else [])
    if signed:  # -1 for the smallest negative value: the largest of a block is kept exactly
        values.remove(max(value for value in values if value < 0))
        values.append(-1.0)
    return torch.tensor(sorted(values), dtype=torch.float32)


def encode(wide: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Bytes of the shape of ``wide`` [rows, columns] in fp32, and scales [rows, ceil(columns / BLOCK)]."""
    rows, columns = wide.shape
    blocks = nn.functional.pad(wide, (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    scales = blocks.abs().amax(-1)
    values = table(signed).to(wide.device)
    middles = (values[1:] + values[:-1]) / 2
    unit = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    codes = torch.bucketize(unit, middles, out_int32=True).to(torch.uint8)
    if not signed:
        codes.clamp_min_((unit > 0).to(torch.uint8))
    return codes.view(rows, -1)[:, :columns].contiguous(), scales


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """The fp32 values that :func:`encode` kept."""
    rows, columns = codes.shape
    values = table(signed).to(codes.device)[codes.int()]
    blocks = nn.functional.pad(values, (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    return (blocks * scales.unsqueeze(-1)).view(rows, -1)[:, :columns]


def fresh(parameter: nn.Parameter) -> dict[str, Tensor]:
    """The state of one parameter before its first step, sharded as it is."""
    state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
    if not quantised(tuple(parameter.shape)):
        return state | {key: torch.zeros_like(parameter).detach() for key in ("exp_avg", "exp_avg_sq")}
    for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        zero = int(torch.bucketize(torch.zeros(()), (table(signed)[1:] + table(signed)[:-1]) / 2))
        state[key] = torch.full_like(parameter, zero, dtype=torch.uint8).detach()
        state[f"{key}_scale"] = _scales(parameter)
    return state


def _scales(parameter: nn.Parameter) -> Tensor:
    """Zeros, one for every block of a row, cut as the parameter's rows are."""
    count = ceil(parameter.shape[1] / BLOCK)
    if not isinstance(parameter, DTensor):
        return torch.zeros(parameter.shape[0], count, device=parameter.device)
    mine = parameter.to_local()
    local = torch.zeros(mine.shape[0], count, device=mine.device)
    shape = torch.Size((parameter.shape[0], count))
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, shape=shape, stride=(count, 1))


class AdamW8bit(Optimizer):
    """AdamW over plain and sharded parameters; each rank updates its own rows, a block of rows at a time."""

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = fresh(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, _local(parameter.grad), group)

    def _update(self, parameter: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] += 1
        weight = _local(parameter)
        if not weight.numel():
            return
        kept = {key: _local(value) for key, value in state.items() if key != "step"}
        rows = max(1, CHUNK // (weight.numel() // weight.shape[0])) if weight.ndim else 1
        for start in range(0, weight.shape[0], rows):
            part = {key: value[start : start + rows] for key, value in kept.items()}
            _adamw(weight[start : start + rows], grad[start : start + rows].float(), part, group, float(state["step"]))


def _adamw(weight: Tensor, grad: Tensor, kept: dict[str, Tensor], group: dict[str, Any], step: float) -> None:
    (beta1, beta2), packed = group["betas"], "exp_avg_scale" in kept
    if packed:
        first = decode(kept["exp_avg"], kept["exp_avg_scale"], True)
        second = decode(kept["exp_avg_sq"], kept["exp_avg_sq_scale"], False).square_()
    else:
        first, second = kept["exp_avg"], kept["exp_avg_sq"]
    first.lerp_(grad.to(first.dtype), 1 - beta1)
    second.mul_(beta2).addcmul_(grad.to(second.dtype), grad.to(second.dtype), value=1 - beta2)
    denominator = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.sub_((first / denominator).mul_(group["lr"] / (1 - beta1**step)).to(weight.dtype))
    if packed:
        for key, wide, signed in (("exp_avg", first, True), ("exp_avg_sq", second.sqrt_(), False)):
            codes, scales = encode(wide, signed)
            kept[key].copy_(codes)
            kept[f"{key}_scale"].copy_(scales)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
