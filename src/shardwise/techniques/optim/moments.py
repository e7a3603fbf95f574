"""AdamW whose moments are kept in 8 bits (Dettmers et al., arXiv 2110.02861).

Each moment of a matrix with at least ``LEAST`` elements is stored as one byte per element, and one fp32 scale, the
largest absolute value, for every ``BLOCK`` columns of a row. The byte is an index into a table of seven decades, with
more values in the higher ones, where most moments lie. For the second moment the square root is stored, since it is the
divisor; one that is not zero is never rounded to zero, or small gradients in a block with large ones would be divided
by nothing. Rounding is stochastic, as in rounding.py: rounded to the nearest, a moment that falls by less than half a
step of the table would never fall. Blocks lie within rows, so a shard of rows has the same bytes and scales under every
layout, and a checkpoint reshards exactly; columns may be cut between two blocks. Moments of smaller parameters have the
parameter's dtype. Nothing is compiled.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.distributed.slices import local
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import OptimSection
from shardwise.techniques.device_tables import constant
from shardwise.techniques.optim.rounding import Kept, RoundedAdamW, draw
from shardwise.techniques.quantised import BLOCK, quantised

DECADES = 7


def _sizes(signed: bool) -> list[float]:
    """Return the values from 0 to 1, ascending: decade d of seven holds 2^d evenly spaced ones (unsigned: 2^(d+1)); 129
    in all (unsigned: 256)."""
    values = [0.0]
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        values += ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - DECADES + 1)).tolist()
    return [*values, 1.0]


SIZES = {signed: _sizes(signed) for signed in (False, True)}
"""Computed at import: at first use, a fake tensor mode may be active, and the values would be lost."""
TABLE = {False: SIZES[False], True: [-size for size in SIZES[True][:1:-1]] + SIZES[True]}
"""The value of each byte, ascending, for signed and unsigned moments. The smallest negative value has no byte."""


def encode(wide: Tensor, signed: bool, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return bytes of the shape of ``wide`` [rows, columns] in fp32, and scales [rows, ceil(columns / BLOCK)]. With
    numbers from 0 to 65535 as ``random``, one an element, rounded stochastically; else to the nearest."""
    rows, columns = wide.shape
    blocks = nn.functional.pad(wide, (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    scales = blocks.abs().amax(-1)
    spread = scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    unit = (blocks.abs() / spread).view(rows, -1)[:, :columns]
    values = constant(wide, ("sizes of moments", signed), SIZES[signed])
    decade = unit.log10().floor_().add_(DECADES).clamp_(0, DECADES - 1)
    count = decade.add(0.0 if signed else 1.0).exp2_()
    stretch = torch.logspace(DECADES - 1, 0, DECADES, device=wide.device)
    place = unit.mul(_each(stretch, decade.int())).sub_(0.1).mul_(count).div_(0.9).sub_(0.5).floor_()
    below = place.add_(count).sub_(0.0 if signed else 1.0).int().clamp_(0, len(values) - 2)
    up = unit.sub(_each(values, below)).div_(_each(values.diff(), below))
    codes = below.add_(up > (0.5 if random is None else random.add(0.5).mul_(2**-16)))
    if signed:  # 127 means zero; below it stand the negative ones
        return codes.sub_((codes * 2 - 1).clamp_min_(0).mul_(wide < 0)).add_(len(values) - 2).to(torch.uint8), scales
    return codes.clamp_min_((unit > 0).int()).to(torch.uint8), scales


def _each(values: Tensor, index: Tensor) -> Tensor:
    """Return ``values[index]``, three times as fast on a CPU."""
    return values.index_select(0, index.reshape(-1)).view(index.shape)


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Undo :func:`encode`, in fp32."""
    rows, columns = codes.shape
    values = _each(constant(codes, ("moments", signed), TABLE[signed]), codes.int())
    blocks = nn.functional.pad(values, (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    return (blocks * scales.unsqueeze(-1)).view(rows, -1)[:, :columns]


def _scales(parameter: nn.Parameter) -> Tensor:
    """Return zeros, one for every block of a row, cut as the parameter is: between two blocks where its columns are."""
    rows, columns = local(parameter.detach()).shape
    if columns % BLOCK and columns < parameter.shape[1]:
        raise ValueError(f"columns are cut into {columns}, which is no multiple of {BLOCK}: a block cannot be divided")
    zeros = torch.zeros(rows, ceil(columns / BLOCK), device=parameter.device)
    if not isinstance(parameter, DTensor):
        return zeros
    count = ceil(parameter.shape[1] / BLOCK)
    shape = torch.Size((parameter.shape[0], count))
    return DTensor.from_local(zeros, parameter.device_mesh, parameter.placements, shape=shape, stride=(count, 1))


class AdamW8bit(RoundedAdamW):
    """AdamW over plain and sharded parameters; each rank updates its own rows, a block of rows at a time."""

    def fresh(self, parameter: nn.Parameter) -> Kept:
        """Return both moments at zero: codes and scales, or for a small parameter plain tensors."""
        if not quantised(tuple(parameter.shape)):
            return {key: torch.zeros_like(parameter).detach() for key in ("exp_avg", "exp_avg_sq")}
        kept = {"exp_avg_scale": _scales(parameter), "exp_avg_sq_scale": _scales(parameter)}
        zeros = {"exp_avg": len(SIZES[True]) - 2, "exp_avg_sq": 0}
        return kept | {key: torch.full_like(parameter, zero, dtype=torch.uint8).detach() for key, zero in zeros.items()}

    def wide(self, kept: Kept) -> tuple[Tensor, Tensor]:
        if "exp_avg_scale" not in kept:
            return super().wide(kept)
        first = decode(kept["exp_avg"], kept["exp_avg_scale"], True)
        return first, decode(kept["exp_avg_sq"], kept["exp_avg_sq_scale"], False).square_()

    def keep(self, kept: Kept, moments: tuple[Tensor, Tensor], random: Tensor) -> None:
        if "exp_avg_scale" not in kept:
            return super().keep(kept, moments, random)
        first, second = moments
        for field, (key, wide) in enumerate((("exp_avg", first), ("exp_avg_sq", second.sqrt())), 1):
            codes, scales = encode(wide, key == "exp_avg", draw(random, field))
            self.write(kept[key], codes)
            self.write(kept[f"{key}_scale"], scales)


def build(groups: list[dict[str, Any]], optim: OptimSection, plan: Plan, seed: int) -> Optimizer:
    """Make it over groups of parameters; ``seed`` is for stochastic rounding."""
    return AdamW8bit(groups, optim.learning_rate, (optim.beta1, optim.beta2), optim.eps, seed=seed)
