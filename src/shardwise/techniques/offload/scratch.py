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

from shardwise.distributed.pinned import locked
from shardwise.errors import OutputError, Problem
from shardwise.spec.units import show_bytes
from shardwise.techniques.offload.sizes import PAGE_BYTES, whole_pages

Call = Callable[[int, list[memoryview], int], int]


class Scratch:
    """A file in ``directory`` with room for places of so many bytes (``sizes``), each of whole pages, for ``what``.
    ``direct``: it is read and written past the page cache. Raises OutputError OUT003 where the disk has no room,
    OUT002 where it cannot be written."""

    def __init__(self, directory: Path, sizes: Sequence[int], what: str = "the optimizer") -> None:
        self.begins, self._for = [0], (directory, what)
        for size in sizes:
            self.begins.append(self.begins[-1] + whole_pages(size))
        self.direct = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._open(directory)
        except OSError as error:
            raise self._refused(error) from error
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
        """Return a place as a tensor with the shape and dtype of ``like``: what is read of it comes into the page
        cache."""
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        assert self._mapped is not None
        flat = torch.frombuffer(self._mapped, dtype=like.dtype, count=like.numel(), offset=self.begins[place])
        return flat.view(like.shape)

    def settle(self) -> None:
        """Write what was filled through :meth:`mapped`, and let the page cache go."""
        if self._mapped is not None:
            self._mapped.flush()
            self._mapped.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(self._buffered, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, place: int, begin: int, into: memoryview) -> None:
        """Fill ``into``, whole pages, from a place, ``begin`` bytes behind its first, which are whole pages too."""
        self._move(os.preadv, into, self.begins[place] + begin)

    def write(self, place: int, begin: int, values: memoryview) -> None:
        self._move(os.pwritev, values, self.begins[place] + begin)

    def _move(self, call: Call, view: memoryview, at: int) -> None:
        try:
            _transfer(call, self._descriptor, view, at)
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> OutputError:
        return _refused(error, *self._for, self.begins[-1])

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # of which the end of Python leaves no name
        for descriptor in {vars(self).get(name) for name in ("_buffered", "_descriptor")}:
            if descriptor is not None:
                close(descriptor)


def aligned(size: int, *, pinned: bool = False) -> tuple[memoryview, Tensor]:
    """Return memory of whole pages, as bytes and as a flat tensor of them; ``pinned`` as long as these are held."""
    room = torch.empty(whole_pages(size) + PAGE_BYTES, dtype=torch.uint8)
    begin = -room.data_ptr() % PAGE_BYTES
    room = locked(room[begin : begin + whole_pages(size)], pinned=pinned)
    array: Any = room.numpy()
    return memoryview(array), room


def _opened_direct(name: str) -> int | None:
    """Open a second descriptor, which goes past the page cache; None where the file system has no such thing: some
    refuse to open, others to read."""
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


def _transfer(call: Call, descriptor: int, view: memoryview, at: int) -> None:
    """Call until every byte has moved: either way may stop early."""
    while len(view):
        moved = call(descriptor, [view], at)
        if moved <= 0:
            raise OSError(errno.EIO, "the file of offloaded numbers ends early")
        view, at = view[moved:], at + moved


def _refused(error: OSError, directory: Path, kept: str, needed: int) -> OutputError:
    fix = "offload.directory=DIRECTORY, one on a disk with room"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        what = f"cannot keep {kept} in {directory}: {(error.strerror or str(error)).lower()}"
        return OutputError(Problem("OUT002", what, "offload.directory", fix))
    free = show_bytes(shutil.disk_usage(directory).free)
    what = f"{kept} of this rank needs {show_bytes(needed)} in {directory}, where {free} are free"
    return OutputError(Problem("OUT003", what, "offload.directory", fix))
