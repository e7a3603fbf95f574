"""A file of numbers that are not in memory: fixed places, read and written past the page cache where the file system
can, by several threads at once.

It has no name, so that the file system frees it when the process ends, however it ends: what a run goes on from are its
checkpoints. The same bytes are mapped too, for what reads or fills them seldom: a checkpoint.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.distributed.pinned import host_buffer
from shardwise.errors import OutputError, Problem
from shardwise.spec.units import show_bytes
from shardwise.techniques.offload.sizes import PAGE_BYTES


def whole_pages(size: int) -> int:
    """``size`` bytes, rounded up to pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


class Scratch:
    """A file in ``directory`` with room for places of so many bytes (``sizes``), each of whole pages. ``direct``: it is
    read and written past the page cache. Raises OutputError OUT003 where the disk has no room, OUT002 where it cannot
    be written, which say what is ``held`` in it."""

    def __init__(self, directory: Path, sizes: Sequence[int], held: str = "the optimizer") -> None:
        self.begins = [0]
        for size in sizes:
            self.begins.append(self.begins[-1] + whole_pages(size))
        self.direct = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._open(directory)
        except OSError as error:
            raise _refused(error, directory, self.begins[-1], held) from error
        self._mapped = mmap.mmap(self._buffered, self.begins[-1]) if self.begins[-1] else None

    def _open(self, directory: Path) -> None:
        descriptor, name = tempfile.mkstemp(prefix=".offload-", dir=directory)
        self._buffered = self._descriptor = descriptor
        try:
            if self.begins[-1]:
                os.posix_fallocate(descriptor, 0, self.begins[-1])  # a full disk is known now, not within a step
            self._descriptor = _opened_direct(name) or descriptor
            self.direct = self._descriptor != descriptor
        finally:
            os.unlink(name)

    def mapped(self, place: int, like: Tensor) -> Tensor:
        """A place as a tensor with the shape and dtype of ``like``: what is read of it comes into the page cache."""
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        assert self._mapped is not None
        flat = torch.frombuffer(self._mapped, dtype=like.dtype, count=like.numel(), offset=self.begins[place])
        return flat.view(like.shape)

    def settle(self) -> None:
        """Writes what was filled through :meth:`mapped`, and lets the page cache go."""
        if self._mapped is not None:
            self._mapped.flush()
            self._mapped.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(self._buffered, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, place: int, begin: int, into: memoryview) -> None:
        """Fill ``into``, whole pages, from a place, ``begin`` bytes behind its first, which are whole pages too."""
        _transfer(os.preadv, self._descriptor, into, self.begins[place] + begin)

    def write(self, place: int, begin: int, values: memoryview) -> None:
        _transfer(os.pwritev, self._descriptor, values, self.begins[place] + begin)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # of which the end of Python leaves no name
        for descriptor in {vars(self).get(name) for name in ("_buffered", "_descriptor")}:
            if descriptor is not None:
                close(descriptor)


def aligned(size: int, *, pinned: bool = False) -> tuple[memoryview, Tensor]:
    """Memory of whole pages, as bytes and as a flat tensor of them."""
    room = host_buffer(whole_pages(size) + PAGE_BYTES, pinned)
    begin = -room.data_ptr() % PAGE_BYTES
    room = room[begin : begin + whole_pages(size)]
    array: Any = room.numpy()
    return memoryview(array), room


def _opened_direct(name: str) -> int | None:
    """A second descriptor, which goes past the page cache; None where the file system has no such thing: some refuse
    to open, others to read."""
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return None
    try:
        os.preadv(descriptor, [mmap.mmap(-1, PAGE_BYTES)], 0)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return None
    return descriptor


def _transfer(call: Callable[[int, list[memoryview], int], int], descriptor: int, view: memoryview, at: int) -> None:
    """Until every byte has moved: either way may stop early."""
    while len(view):
        moved = call(descriptor, [view], at)
        if moved <= 0:
            raise OSError(errno.EIO, "the file of offloaded numbers ends early")
        view, at = view[moved:], at + moved


def _refused(error: OSError, directory: Path, needed: int, held: str) -> OutputError:
    fix = "offload.directory=DIRECTORY, one on a disk with room"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        what = f"cannot keep {held} in {directory}: {(error.strerror or str(error)).lower()}"
        return OutputError(Problem("OUT002", what, "offload.directory", fix))
    free = show_bytes(shutil.disk_usage(directory).free)
    what = f"{held} of this rank needs {show_bytes(needed)} in {directory}, where {free} are free"
    return OutputError(Problem("OUT003", what, "offload.directory", fix))
