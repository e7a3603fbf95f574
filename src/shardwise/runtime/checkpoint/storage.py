"""The storage of tensors in files: torch.distributed.checkpoint's storage interface on safetensors, without pickle.

DCP's planners decide who writes which slice (each once, also when it is replicated) and which slices a reader needs,
whatever the layouts; here slices become bytes. A rank's slices of one group of tensors (``model``, ``optim``) are one
file: a safetensors header and one flat buffer. That buffer is the snapshot too, so a save copies every byte once in
memory and writes it from there.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardwise.distributed.pinned import host_buffer
from shardwise.distributed.torch_private import deduplicated
from shardwise.errors import OutputError, Problem
from shardwise.models.tensorfile import DTYPES, NAMES, encode_header
from shardwise.runtime.checkpoint import commit
from shardwise.runtime.checkpoint import manifest as manifests
from shardwise.runtime.checkpoint.manifest import STATE, FileRecord, Manifest, Slice, TensorRecord
from shardwise.runtime.objects import may_travel
from shardwise.spec.files import open_regular
from shardwise.spec.units import show_bytes

READ_BYTES = 64 << 20
"""Largest block read at once, so that loading needs little memory beside the tensors."""


class ShardPlanner(DefaultSavePlanner):
    """DCP's planner, but without empty slices: a rank that has no rows under FSDP writes nothing."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return what DCP's does, which also compares slices with one another: all with all where a tensor is not cut
        along its longest dim. Here that is checked, sooner, before a checkpoint is committed."""
        self.global_plan, self.metadata = create_default_global_save_plan(deduplicated(all_plans))
        return self.global_plan, self.metadata

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if _dtype(item) not in NAMES:
                raise TypeError(f"{item.index.fqn} is {_dtype(item)}, which safetensors cannot hold")
        items = [item for item in plan.items if _item_bytes(item) or not prod(_data(item).size)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan


@dataclass(frozen=True)
class ShardFile:
    """A file to be written: its name, its safetensors header, and where in its body each item begins, in bytes."""

    name: str
    header: bytes
    items: tuple[tuple[WriteItem, int], ...]
    body_bytes: int


@dataclass(frozen=True)
class StoredSlice:
    """The result of ``write_data`` for one slice: the file, what was written into it, and where the slice begins."""

    file: str
    record: FileRecord
    begin: int


@dataclass(frozen=True)
class Target:
    """The place that one save goes to. Set by the first rank for all, in ``prepare_global_plan``."""

    path: Path
    rank: int
    world_size: int


may_travel(StoredSlice, Target)


class _Store:
    """The part of DCP's interface that both ends share: any place will do, and a rank's plan stands as it is."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan


class ShardWriter(_Store, StorageWriter):
    """Writes checkpoints into ``directory``: of the step and with the facts (JSON) that ``describe`` was told last.

    ``stage`` copies the slices of this rank into host buffers that are used again at the next save, ``staged_on_disk``
    into files without a name in ``directory``; ``write_data`` writes those, or stages first if nobody did. ``finish``
    commits.
    """

    def __init__(
        self, directory: str | Path, run_id: str, disk: commit.Disk = commit.DISK, staged_on_disk: bool = False
    ) -> None:
        self.directory = Path(directory)
        self.run_id = run_id
        self.disk = disk
        self.generation = 0
        self._step = 0
        self._facts = b"{}"
        self._attempt: commit.Attempt | None = None
        self.staged_on_disk = staged_on_disk
        self._buffers: dict[str, Tensor] = {}
        self._staged: list[ShardFile] | None = None
        self._last_staged: list[ShardFile] | None = None

    def describe(self, step: int, facts: bytes) -> None:
        """Set the step and the facts of the next save."""
        self._step, self._facts = step, facts

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.abandon()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator and not self.generation:
            self.generation = commit.claim(self.directory, self.disk)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the temporary directory (first rank) and tell every rank of it."""
        path = self.begin(plans)
        return [dataclasses.replace(plan, storage_data=Target(path, r, len(plans))) for r, plan in enumerate(plans)]

    def begin(self, plans: list[SavePlan]) -> Path:
        """Make the temporary directory for what all ranks are to write; see commit.begin for what it raises."""
        need_bytes = len(self._facts) + sum(_item_bytes(item) for plan in plans for item in plan.items)
        self._attempt = commit.begin(self.directory, self._step, self.generation, need_bytes, self.disk)
        return self._attempt.path

    def stage(
        self, plan: SavePlan, planner: SavePlanner, rank: int, size: int, stream: torch.cuda.Stream | None = None
    ) -> int:
        """Copy this rank's slices into host memory; they may change as soon as this returns. The size in bytes.

        From a GPU they go over ``stream`` (the current one if None), beside what the device computes.
        """
        parts = lay_out(plan, rank, size)
        on_device = False
        with torch.cuda.stream(stream):
            for part in parts:
                for item, begin in part.items:
                    source = planner.resolve_data(item)
                    assert isinstance(source, Tensor)
                    on_device = on_device or source.is_cuda
                    target = self._buffer(part, pinned=source.is_cuda)[begin : begin + _item_bytes(item)]
                    target.view(source.dtype).view(source.shape).copy_(source.detach(), non_blocking=True)
            if on_device:
                torch.cuda.current_stream().synchronize()
        self._staged = self._last_staged = parts
        return sum(part.body_bytes for part in parts)

    def begin_again(self) -> None:
        """Give up the files of a save, whose bytes are still in the buffers, so that they can be written again."""
        self.abandon()
        self._staged = self._last_staged

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and sync this rank's files. Raises OSError as the disk does."""
        target: Target = plan.storage_data
        if self._staged is None:
            self.stage(plan, planner, target.rank, target.world_size)
        results, parts = [], self._staged or []
        self._staged = None
        for part in parts:
            blocks = [memoryview(part.header)]
            if part.body_bytes:
                blocks.append(_bytes_of(self._buffers[part.name])[: part.body_bytes])
            record = commit.write_file(target.path / part.name, blocks, self.disk)
            for item, begin in part.items:
                stored = StoredSlice(part.name, record, len(part.header) + begin)
                results.append(WriteResult(item.index, _item_bytes(item), stored))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.commit(metadata, results)

    def commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> Path:
        """Check that what was written covers every tensor, then commit (first rank); the checkpoint's directory.

        Raises Rejected (CKPT015) if a slice was not written; else see commit.publish.
        """
        assert self._attempt is not None, "nothing was begun"
        files = {STATE: commit.write_file(self._attempt.path / STATE, [memoryview(self._facts)], self.disk)}
        stored: dict[MetadataIndex, StoredSlice] = {each.index: each.storage_data for each in chain(*results)}
        files |= {entry.file: entry.record for entry in stored.values()}
        tensors = {name: _record(name, entry, stored) for name, entry in metadata.state_dict_metadata.items()}
        manifests.check_coverage(tensors)
        manifest = Manifest(self.run_id, self._step, self.generation, len(results), files, tensors)
        target = commit.publish(self._attempt, manifest, self.disk)
        self._attempt = None
        return target

    def abandon(self) -> None:
        """Discard what is staged, and remove the temporary directory if this rank made one that is not committed."""
        self._staged = None
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            commit.abandon(attempt, self.disk)

    def _buffer(self, part: ShardFile, pinned: bool) -> Tensor:
        buffer = self._buffers.get(part.name)
        if buffer is None or len(buffer) < part.body_bytes:
            if self.staged_on_disk:
                buffer = disk_buffer(part.body_bytes, self.directory)
            else:
                buffer = host_buffer(part.body_bytes, pinned)
            self._buffers[part.name] = buffer
        return buffer


class ShardReader(_Store, StorageReader):
    """Reads slices of one committed checkpoint. The bytes must have been checked before (manifest.check_files)."""

    def __init__(self, directory: str | Path, manifest: Manifest | None = None) -> None:
        self.directory = Path(directory)
        self.manifest = manifest or manifests.read(self.directory)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        return

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's metadata from the manifest; storage_data maps each slice to where it lies."""
        metadata: dict[str, TensorStorageMetadata] = {}
        where: dict[MetadataIndex, tuple[Slice, torch.dtype]] = {}
        for name, record in self.manifest.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(s.offsets), torch.Size(s.sizes)) for s in record.slices]
            properties = TensorProperties(dtype=DTYPES[record.dtype])
            metadata[name] = TensorStorageMetadata(properties, torch.Size(record.shape), chunks)
            where |= {MetadataIndex(name, s.offsets): (s, DTYPES[record.dtype]) for s in record.slices}
        return Metadata(metadata, storage_data=where)  # type: ignore[arg-type]

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._where: dict[MetadataIndex, tuple[Slice, torch.dtype]] = metadata.storage_data

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            where, dtype = self._where[item.storage_index]
            target = planner.resolve_tensor(item).detach()
            with open_regular(self.directory / where.file) as file:
                _read_box(file.fileno(), where, dtype, item, target)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def disk_buffer(size_bytes: int, directory: Path) -> Tensor:
    """A buffer that need not stay in memory: a file in ``directory`` that has no name, and is gone with the process.
    Raises OutputError (OUT003) where the disk has no room."""
    with tempfile.TemporaryFile(dir=directory) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, max(1, size_bytes))
        except OSError as error:
            free = show_bytes(shutil.disk_usage(directory).free)
            what = f"the copy of what this rank saves needs {show_bytes(size_bytes)} in {directory}, {free} are free"
            raise OutputError(Problem("OUT003", what, str(directory), "free space, or another run.out")) from error
        return torch.frombuffer(mmap.mmap(file.fileno(), max(1, size_bytes)), dtype=torch.uint8)[:size_bytes]


def copy_stream(tensors: Mapping[str, Tensor]) -> torch.cuda.Stream | None:
    """A stream for copying ``tensors`` that begins when what was asked of their GPU so far is done; None on a CPU."""
    devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
    if not devices:
        return None
    (device,) = devices
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def lay_out(plan: SavePlan, rank: int, world_size: int) -> list[ShardFile]:
    """The files of one rank. Wide data types come first, so that every slice is aligned for its type."""
    groups: dict[str, list[WriteItem]] = {}
    for item in plan.items:
        groups.setdefault(item.index.fqn.split(".")[0], []).append(item)
    parts = []
    for group, items in sorted(groups.items()):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        placed, begin = [], 0
        for item in sorted(items, key=lambda item: -_dtype(item).itemsize):
            chunk = _data(item).chunk
            name = item.index.fqn
            end = begin + _item_bytes(item)
            if name in header:  # several slices of one tensor in one file need names of their own
                name += f"@{','.join(map(str, chunk.offsets))}"
            header[name] = {"dtype": NAMES[_dtype(item)], "shape": list(chunk.sizes), "data_offsets": [begin, end]}
            placed.append((item, begin))
            begin = end
        file = f"{group}-{rank:05d}-of-{world_size:05d}.safetensors"
        parts.append(ShardFile(file, encode_header(header), tuple(placed), begin))
    return parts


def _read_box(descriptor: int, where: Slice, dtype: torch.dtype, item: ReadItem, target: Tensor) -> None:
    """Copy the box that ``item`` names out of a stored slice into ``target``, in blocks of whole rows."""
    if not where.sizes:
        target.copy_(_read_rows(descriptor, where.begin, dtype, ()))
        return
    row_shape = where.sizes[1:]
    row_bytes = prod(row_shape) * dtype.itemsize
    rows = max(1, READ_BYTES // max(row_bytes, 1))
    inner = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets[1:], item.lengths[1:], strict=True))
    for first in range(0, item.lengths[0], rows):
        count = min(rows, item.lengths[0] - first)
        begin = where.begin + (item.storage_offsets[0] + first) * row_bytes
        block = _read_rows(descriptor, begin, dtype, (count, *row_shape))
        target[first : first + count].copy_(block[(slice(None), *inner)])


def _read_rows(descriptor: int, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    size = prod(shape) * dtype.itemsize
    raw = torch.empty(size, dtype=torch.uint8)
    done = manifests.read_at(descriptor, _bytes_of(raw), begin)
    if done < size:
        raise OSError(f"the file ends at byte {begin + done}, {size - done} bytes early")
    return raw.view(dtype).view(shape)


def fill(directory: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Read what this rank holds of ``tensors``, in place. The manifest may list more of them."""
    reader = ShardReader(directory, manifest)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(tensors), metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(planner.create_local_plan(), planner).wait()


def _bytes_of(raw: Tensor) -> memoryview:
    """The memory of a flat uint8 tensor on the host."""
    array: Any = raw.numpy()
    return memoryview(array)


def _record(name: str, entry: Any, stored: Mapping[MetadataIndex, StoredSlice]) -> TensorRecord:
    found = ((chunk, stored.get(MetadataIndex(name, chunk.offsets))) for chunk in entry.chunks)
    slices = (Slice(tuple(c.offsets), tuple(c.sizes), s.file, s.begin) for c, s in found if s is not None)
    return TensorRecord(tuple(entry.size), NAMES[entry.properties.dtype], tuple(slices))


def _data(item: WriteItem) -> Any:
    """DCP's TensorWriteData: the whole tensor's size and properties, and the chunk of it."""
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn} is not a tensor; keep it among the facts")
    return item.tensor_data


def _dtype(item: WriteItem) -> torch.dtype:
    return _data(item).properties.dtype


def _item_bytes(item: WriteItem) -> int:
    return prod(_data(item).chunk.sizes) * _dtype(item).itemsize
