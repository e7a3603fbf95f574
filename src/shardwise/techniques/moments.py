"""AdamW whose moments are kept in 8 bits (Dettmers et al., arXiv 2110.02861).

A matrix of at least ``LEAST`` elements keeps each moment as one byte an element and one fp32 scale, the largest size,
for every ``BLOCK`` columns of a row. The byte names a value of a table that is dense where moments are many: seven
decades, more values in the higher ones. Of the second moment it is the root that is kept, which is what is divided by,
and one that is not zero never becomes zero: in a block of gradients of very different sizes the small ones would else
be divided by nothing. Rounding is stochastic, as in rounding.py: rounded to the nearest, a moment that falls by less
than half a step of the table would never fall. Blocks lie within rows, so a shard of rows has the same bytes and scales
whatever the layout, and a checkpoint reshards exactly; columns may be cut between two blocks. Smaller parameters keep
moments of their own type. No compilation.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.techniques.constants import constant
from shardwise.techniques.quantised import BLOCK, quantised
from shardwise.techniques.rounding import Kept, RoundedAdamW, draw
from shardwise.techniques.slices import local

DECADES = 7


def _sizes(signed: bool) -> list[float]:
    """The values from 0 to 1, ascending: decade d of seven holds 2^d (unsigned 2^(d+1)) evenly; 129 (256) in all."""
    values = [0.0]
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        values += ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - DECADES + 1)).tolist()
    return [*values, 1.0]


SIZES = {signed: _sizes(signed) for signed in (False, True)}
"""Made here, not when they are first used: that may be among fake tensors, whose numbers mean nothing."""
TABLE = {False: SIZES[False], True: [-size for size in SIZES[True][:1:-1]] + SIZES[True]}
"""What each byte means, by whether it is signed, ascending. Of the negative ones the smallest has no byte."""


def encode(wide: Tensor, signed: bool, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Bytes of the shape of ``wide`` [rows, columns] in fp32, and scales [rows, ceil(columns / BLOCK)]. With numbers
    from 0 to 65535 as ``random``, one an element, rounded stochastically; else to the nearest."""
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
    """``values[index]``, which takes three times as long on a CPU."""
    return values.index_select(0, index.reshape(-1)).view(index.shape)


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """The fp32 values that :func:`encode` kept."""
    rows, columns = codes.shape
    values = _each(constant(codes, ("moments", signed), TABLE[signed]), codes.int())
    blocks = nn.functional.pad(values, (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    return (blocks * scales.unsqueeze(-1)).view(rows, -1)[:, :columns]


def _scales(parameter: nn.Parameter) -> Tensor:
    """Zeros, one for every block of a row, cut as the parameter is: between two blocks where its columns are."""
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
        """Bytes that mean zero, and scales; of a small parameter both moments as they are."""
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
