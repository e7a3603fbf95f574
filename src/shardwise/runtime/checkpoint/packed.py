"""The plans and results of ranks that save together, as text. The first rank reads those of all, a million slices among
some hundred ranks; to read DCP's own objects without running code takes a millisecond a slice."""

from __future__ import annotations

import json

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from shardwise.models.tensorfile import DTYPES, NAMES
from shardwise.runtime.checkpoint.manifest import FileRecord
from shardwise.runtime.checkpoint.storage import StoredSlice


def pack_plan(plan: SavePlan) -> str:
    """Return the slices of a plan of tensors: of each the tensor's name, where the slice begins in it, both sizes, and
    the dtype."""
    rows = []
    for item in plan.items:
        assert item.tensor_data is not None
        data, chunk = item.tensor_data, item.tensor_data.chunk
        dtype = NAMES[data.properties.dtype]
        rows.append((item.index.fqn, item.type.name, chunk.offsets, chunk.sizes, data.size, dtype))
    return json.dumps(rows)


def unpack_plan(text: str) -> SavePlan:
    """The inverse of :func:`pack_plan`."""
    items = []
    properties = {name: TensorProperties(dtype=dtype) for name, dtype in DTYPES.items()}
    for name, kind, offsets, sizes, shape, dtype in json.loads(text):
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        data = TensorWriteData(chunk, properties[dtype], torch.Size(shape))
        items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType[kind], tensor_data=data))
    return SavePlan(items)


def pack_results(results: list[WriteResult]) -> str:
    """Return what a rank wrote: its files, and where in which of them each slice begins."""
    files = {result.storage_data.file: result.storage_data.record for result in results}
    rows = [
        (result.index.fqn, result.index.offset, result.size_in_bytes, stored.file, stored.begin)
        for result in results
        if (stored := result.storage_data)
    ]
    return json.dumps([{name: (record.bytes, record.chunks) for name, record in files.items()}, rows])


def unpack_results(text: str) -> list[WriteResult]:
    """The inverse of :func:`pack_results`."""
    files, rows = json.loads(text)
    records = {name: FileRecord(size, tuple(chunks)) for name, (size, chunks) in files.items()}
    return [
        WriteResult(MetadataIndex(name, torch.Size(offset)), size, StoredSlice(file, records[file], begin))
        for name, offset, size, file, begin in rows
    ]
