"""Safetensors files: what the ``safetensors`` package does not do.

The package validates the header. Added here: why a file was refused, by error code; duplicate names; reading a slice
without allocating more; and writing one tensor at a time. A file is an eight-byte length,
a JSON header {name: {dtype, shape, data_offsets}}, and the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.errors import DataError, Problem, first_line
from shardwise.spec.file_kind import recognise
from shardwise.spec.files import TABLE_BYTES, open_regular, read_regular

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 50 * 2**20


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: bytes ``start`` to ``stop`` of the file, ``shape`` elements of ``dtype``."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    def rows(self, start: int, stop: int) -> Entry:
        """Return the rows ``start`` to ``stop`` as a tensor of their own: they lie together."""
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        first = self.start + start * row_bytes
        return Entry(self.path, self.dtype, (stop - start, *self.shape[1:]), first, self.start + stop * row_bytes)

    def mapped(self) -> Tensor:
        """The tensor without a copy: the file is mapped, and what is not used is not read. One that lies unaligned in
        it is copied whole."""
        if not prod(self.shape):
            return torch.empty(self.shape, dtype=self.dtype)
        with open_regular(self.path) as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        source: mmap.mmap | bytearray = mapped
        offset = self.start
        if offset % self.dtype.itemsize:
            source, offset = bytearray(mapped[self.start : self.stop]), 0
        return torch.frombuffer(source, dtype=self.dtype, count=prod(self.shape), offset=offset).view(self.shape)

    def read(self, part: Sequence[slice] | None = None) -> Tensor:
        """A copy of the slice ``part`` of the tensor; no more than that is allocated."""
        return self.mapped()[tuple(part) if part is not None else ...].clone(memory_format=torch.contiguous_format)

    def read_finite(self, name: str, part: Sequence[slice]) -> Tensor:
        """Read a slice as :meth:`read` does; raises DataError (MOD006) if it holds NaN or infinity. ``name`` is for the
        message."""
        values = self.read(part)
        check_finite(values, name, self.path)
        return values


def check_finite(values: Tensor, name: str, path: Path) -> None:
    """Raise DataError (MOD006) if what was read of this tensor of a file holds NaN or infinity. The smallest and the
    largest of what was just copied cost a tenth of the copy, and NaN is both."""
    if values.numel() and not all(math.isfinite(edge) for edge in torch.stack(torch.aminmax(values)).tolist()):
        nans, bad = int(values.isnan().sum()), int((~values.isfinite()).sum())
        counts = [f"{count:,} {word}" for count, word in ((nans, "NaN"), (bad - nans, "infinite")) if count]
        what = f"`{name}` holds {' and '.join(counts)} of {values.numel():,} values read"
        fix = "download the file again, or take an earlier checkpoint of that model: this file is damaged"
        raise DataError(Problem("MOD006", what, str(path), fix))


def entries(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file. Raises DataError: CKPT005 truncated, CKPT006 something else, CKPT009 a header
    that contradicts itself, CKPT010 a header too large."""
    size = path.stat().st_size
    with open_regular(path) as file:
        head = file.read(9)
        length = int.from_bytes(head[:8], "little")
        if head[8:] != b"{":
            what, fix = f"{path.name} is not a safetensors file ({size:,} bytes)", "fetch the file again, or convert it"
            raise DataError(recognise(path) or Problem("CKPT006", what, str(path), fix))
        if length > MAX_HEADER_BYTES:
            what = f"{path.name}: header of {length:,} bytes, over the limit of {MAX_HEADER_BYTES:,}"
            raise DataError(Problem("CKPT010", what, str(path), "split the weights over more files"))
        if 8 + length > size:
            raise _truncated(path, size, 8 + length)
        file.seek(8)
        header = parse_json(path, file.read(length))
    header.pop("__metadata__", None)
    try:
        with safe_open(path, "pt"):
            pass
    except SafetensorError as error:
        if "incomplete" in str(error).lower():  # the header is sound, but ends before or after the file does
            end = 8 + length + max((facts["data_offsets"][1] for facts in header.values()), default=0)
            if end > size:
                raise _truncated(path, size, end) from error
            raise _contradiction(path, f"{size - end:,} bytes at the end belong to no tensor") from error
        raise _contradiction(path, first_line(error, 200).rpartition("header: ")[2]) from error
    if odd := {facts["dtype"] for facts in header.values()} - DTYPES.keys():
        raise _contradiction(path, f"dtype {min(odd)} is not supported")
    return {name: _entry(path, facts, 8 + length) for name, facts in header.items()}


def shortened(name: str) -> str:
    """A name from a file, cut to a length that fits a message."""
    return name if len(name) <= 200 else f"{name[:200]}... ({len(name):,} characters)"


def some(names: Sequence[str], most: int = 3) -> str:
    """The first of these names, and how many more there are."""
    return ", ".join(map(shortened, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def _truncated(path: Path, size: int, wanted: int) -> DataError:
    what = f"{path.name} has {size:,} bytes, its header says {wanted:,}: the copy is incomplete"
    return DataError(Problem("CKPT005", what, str(path), "copy or download the file again"))


def _contradiction(path: Path, what: str) -> DataError:
    fix = "fetch the file again from where it was made"
    return DataError(Problem("CKPT009", f"{path.name}: {what}", str(path), fix))


def parse_json(path: Path, text: bytes) -> dict[str, Any]:
    """A JSON object without duplicate keys, which parsers would pass over in silence."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise _contradiction(path, f"`{key[:200]}` is listed twice")
            result[key] = value
        return result

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # of text, of syntax, of numbers with thousands of digits, of depth
        raise _contradiction(path, f"not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise _contradiction(path, "not a JSON object")
    return value


def read_json(path: Path, most_bytes: int = TABLE_BYTES) -> dict[str, Any]:
    """The JSON object in a file that came with a model. Raises DataError (CKPT009)."""
    try:
        return parse_json(path, read_regular(path, most_bytes))
    except OSError as error:
        raise _contradiction(path, f"cannot be read: {error.strerror}") from error


def _entry(path: Path, facts: dict[str, Any], data_start: int) -> Entry:
    start, stop = facts["data_offsets"]
    return Entry(path, DTYPES[facts["dtype"]], tuple(facts["shape"]), data_start + start, data_start + stop)


def encode_header(header: Mapping[str, Any]) -> bytes:
    """A file's length field and header, padded so that the tensors after it are aligned."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    tensors: Iterable[Tensor],
    others: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> None:
    """Write a file of ``tensors``, made one at a time in the order of ``shapes`` and cast to ``dtype``, or to what
    ``others`` has for their name."""
    dtypes = {name: others.get(name, dtype) for name in shapes}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        stop = position + prod(shape) * dtypes[name].itemsize
        header[name] = {"dtype": NAMES[dtypes[name]], "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(encode_header(header))
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} is {tuple(tensor.shape)}, to be written as {shape}")
            flat = tensor.detach().to("cpu", dtypes[name]).contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
