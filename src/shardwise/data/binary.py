"""Token ids prepared by other programs: Megatron's ``.bin`` with its ``.idx``, and nanoGPT's ``.bin`` (plain uint16).

The ids are used unchanged. Documents end where the ``.idx`` says, or else at end-of-text; a document without an
end-of-text at its end gets one, and empty documents are left out.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwise.data.read import SourcePart
from shardwise.errors import DataError, Problem
from shardwise.spec.files import read_regular

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_INDEX_BYTES = 2**34
"""Twenty bytes a document."""
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def index_of(path: Path) -> Path | None:
    """The ``.idx`` beside a ``.bin``, where there is one. Raises DATA010 for one that no data can have."""
    index = path.with_suffix(".idx")
    if not index.is_file():
        return None
    if (size := index.stat().st_size) > _INDEX_BYTES:
        raise _fault(index, f"size {size:,} is larger than {_INDEX_BYTES:,} (limit)")
    return index


def _fault(path: Path, what: str) -> DataError:
    return DataError(Problem("DATA010", f"{path.name}: {what}", str(path), "copy the file again, or name another file"))


def _layout(path: Path) -> tuple[np.dtype[np.generic], NDArray[np.int64] | None]:
    """The dtype of the ids and, if there is an index, where documents end, in tokens. Raises DATA010."""
    size = path.stat().st_size
    index = index_of(path)
    if index is None:
        if size % 2:
            raise _fault(path, f"size {size:,} is not a multiple of 2 (uint16)")
        return np.dtype("<u2"), None
    raw = read_regular(index, _INDEX_BYTES)
    if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
        raise _fault(index, f"it does not start like a Megatron index, but with {raw[:9]!r}")
    _, version, code, sequences, documents = _HEADER.unpack_from(raw)
    if version != 1 or code not in _TYPES:
        raise _fault(index, f"version {version} with data type {code}; only version 1 with integers is supported")
    expected = _HEADER.size + 12 * sequences + 8 * documents
    if len(raw) != expected or not documents:
        raise _fault(index, f"size {len(raw):,} should be {expected:,} for {sequences:,} sequences")
    dtype = np.dtype(_TYPES[code])
    if size % dtype.itemsize:
        raise _fault(path, f"size {size:,} is not a multiple of {dtype.itemsize} ({dtype.name})")
    pointers = np.frombuffer(raw, "<i8", sequences, _HEADER.size + 4 * sequences)
    firsts = np.frombuffer(raw, "<i8", documents, _HEADER.size + 12 * sequences)
    starts = np.append(pointers, size) // dtype.itemsize
    if firsts.min() < 0 or firsts.max() > sequences or starts.max() * dtype.itemsize > size:
        raise _fault(index, f"it points outside of {path.name}")
    return dtype, starts[firsts[1:]]


def documents(part: SourcePart, eot_id: int, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """The ids of one part, the positions in it where documents end (after their end-of-text), and how many documents
    were empty. Raises DATA009 for an id that the tokenizer does not have."""
    dtype, ends = _layout(part.path)
    first, stop = part.start // dtype.itemsize, part.stop // dtype.itemsize
    before = max(first - 1, part.source.start // dtype.itemsize)
    read = np.fromfile(part.path, dtype, stop - before, offset=before * dtype.itemsize).astype(np.int64)
    wrong = (read < 0) | (read >= vocab_size)
    if wrong.any():
        at = int(wrong.argmax())
        what = f"{part.name}: id {read[at]} at token {before + at:,} >= vocab {vocab_size}"
        fix = "data.tokenizer.path=TOKENIZER, the one that made these ids"
        raise DataError(Problem("DATA009", what, str(part.path), fix))
    ids = read[first - before :]
    closes = ids == eot_id
    if ends is not None:
        inside = ends[(ends > first) & (ends <= stop)] - first - 1
        closes = np.zeros(len(ids), dtype=bool)
        closes[inside] = True
    if part.stop == part.source.stop and len(ids) > 0:
        closes[-1] = True
    missing = closes & (ids != eot_id)
    # An end-of-text directly after the end of a document, or at the very beginning, ends an empty document.
    begins = first == before or bool(read[0] == eot_id if ends is None else (ends == first).any())
    hollow = closes & ~missing & np.concatenate([[begins], closes[:-1]])
    after = np.flatnonzero(missing) + 1
    ids = np.insert(ids, after, eot_id)
    keep = np.insert(~hollow, after, True)
    marks = np.insert(closes & ~missing, after, True)
    return ids[keep], np.flatnonzero(marks[keep]) + 1, int(hollow.sum())
