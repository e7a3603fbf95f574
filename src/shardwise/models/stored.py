"""A parameter as the files hold it: in one tensor or several, in rows among others, or packed in 4 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from shardwise.models.float8 import WRITTEN, Scales
from shardwise.models.hf_names import PACKED, Location
from shardwise.models.quantization import USUAL
from shardwise.models.tensorfile import Entry, check_finite

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of 4 bits without the highest, which is the sign."""
_ROWS = 4096
SCALE_BIAS = 127
"""What is taken from a scale's byte to give the power of two that it stands for (E8M0)."""


@dataclass(frozen=True)
class StoredRows:
    """Some rows of a parameter: where they are, and the tensor that holds them; of MXFP4 the blocks, and the scales. Of
    one in ``float8`` its scales."""

    location: Location
    entry: Entry
    scales: Entry | None = None
    float8: Scales | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which its values are read."""
        if self.float8 is not None:
            return torch.float32
        return self.entry.dtype if self.scales is None else torch.bfloat16

    def read_into(self, out: Tensor, first: int, columns: Sequence[slice]) -> None:
        """Copy as many rows as ``out`` has, from row ``first`` of the parameter on, of these columns. The file is
        mapped, so that no more is read."""
        chosen = slice(first - self.location.start, first - self.location.start + out.shape[0])
        if self.scales is None:
            out.copy_(self._rows(self.entry)[(chosen, *columns)])
            if self.float8 is not None:
                transposed = self.location.transposed
                scales = self._matrix(self.float8.entry)
                own = self.float8.transposed() if transposed else self.float8
                own.apply(out, scales.T if transposed else scales, self.location.places[chosen], *columns)
            return
        [wanted] = columns
        groups = slice(wanted.start // PACKED, -(-wanted.stop // PACKED))
        values = dequantised(*(self._rows(entry)[chosen, groups] for entry in (self.entry, self.scales)))
        skipped = groups.start * PACKED
        out.copy_(values[:, wanted.start - skipped : wanted.stop - skipped])

    def block_scales(self, first: int, last: int) -> Tensor | None:
        """Return in fp32 the scales of the blocks that these rows of the parameter are, one row of blocks after
        another. None where they are not in e4m3 with scales of the usual blocks, or are no whole rows of blocks."""
        location, float8 = self.location, self.float8
        if float8 is None or (float8.rows, float8.columns) != USUAL or self.entry.dtype != WRITTEN:
            return None
        start, stop = (location.first + row - location.start for row in (first, last))
        ends = stop % USUAL[0] == 0 or stop == location.shape[-2]
        if location.transposed or location.step != 1 or start % USUAL[0] or not ends:
            return None
        return float8.wide(self._matrix(float8.entry)[start // USUAL[0] : -(-stop // USUAL[0])])

    def _rows(self, entry: Entry) -> Tensor:
        return self.location.rows(self._matrix(entry))

    def _matrix(self, entry: Entry) -> Tensor:
        """Return the tensor, of a stack that of the expert."""
        expert = self.location.expert
        return entry.mapped() if expert is None else entry.rows(expert, expert + 1).mapped()[0]


@dataclass(frozen=True)
class KeptTensor:
    """A tensor of a model's files that is no parameter, and is written again as it is; from float8 in another dtype."""

    entry: Entry
    float8: Scales | None = None

    def read(self) -> Tensor:
        """Return its values; with scales in fp32."""
        if self.float8 is None:
            return self.entry.mapped()
        values, scales = self.entry.mapped().float(), self.float8.entry.mapped()
        *_, rows, columns = values.shape
        each = zip(values.view(-1, rows, columns), scales.view(-1, *scales.shape[-2:]), strict=True)
        for matrix, own in each:
            self.float8.apply(matrix, own, range(rows), slice(0, columns))
        return values


@dataclass(frozen=True)
class KeptLayers:
    """The tensors of layers that predict further tokens, by their names in files, and what a config says of these."""

    tensors: Mapping[str, KeptTensor] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredParameter:
    """A parameter: its pieces in the order of their rows. What lies behind them is new: the mean of all rows."""

    pieces: tuple[StoredRows, ...]

    def read_finite(self, part: Sequence[slice]) -> Tensor:
        """A copy of the slice ``part``, and no more read or allocated; raises DataError (MOD006) if it holds NaN or
        infinity."""
        rows, *columns = part
        dtype = reduce(torch.promote_types, {piece.dtype for piece in self.pieces})
        out = torch.empty([each.stop - each.start for each in part], dtype=dtype)
        for piece in self.pieces:
            first, last = max(rows.start, piece.location.start), min(rows.stop, piece.location.stop)
            if first < last:
                own = out[first - rows.start : last - rows.start]
                piece.read_into(own, first, columns)
                check_finite(own, piece.location.tensor, piece.entry.path)
        held = self.pieces[-1].location.stop
        if rows.stop > held:
            out[max(0, held - rows.start) :] = self._mean(held, columns)
        return out

    def block_scales(self, rows: slice) -> Tensor | None:
        """Return the scales of the blocks that these rows are, as :meth:`StoredRows.block_scales`; None where a piece
        has none, or begins within a block of theirs."""
        found = list[Tensor]()
        for piece in self.pieces:
            first, last = max(rows.start, piece.location.start), min(rows.stop, piece.location.stop)
            if first < last:
                own = None if (first - rows.start) % USUAL[0] else piece.block_scales(first, last)
                if own is None:
                    return None
                found.append(own)
        return torch.cat(found) if found else None

    def _mean(self, held: int, columns: Sequence[slice]) -> Tensor:
        """Return the mean of all rows, in fp64, some at a time: a new token begins as the average of what the model
        knows (Hewitt, "Initializing New Word Embeddings for Pretrained Language Models", 2021)."""
        parts = (slice(first, min(first + _ROWS, held)) for first in range(0, held, _ROWS))
        return torch.stack([self.read_finite((part, *columns)).double().sum(0) for part in parts]).sum(0) / held


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """The bf16 values [n,32g] of MXFP4 blocks uint8 [n,g,16], two values a byte, the lower 4 bits first, and scales
    uint8 [n,g], a power of two for 32 values (Open Compute Project, "Microscaling Formats", 2023; scale 255 is NaN).
    Nothing is rounded."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), -1).view(torch.int32).flatten()
    powers = torch.ldexp(torch.ones(256), byte - SCALE_BIAS).bfloat16()
    powers[255] = torch.nan
    wide = pairs.index_select(0, blocks.flatten().int()).view(torch.bfloat16).view(*scales.shape, PACKED)
    return wide.mul_(powers[scales.int()].unsqueeze(-1)).flatten(-2)
