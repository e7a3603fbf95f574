"""Memory of the host that a GPU reads and writes beside its work."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


def host_buffer(size_bytes: int, pinned: bool) -> Tensor:
    """Memory of the host; ``pinned``: locked, so that a GPU copies into it beside its work. It is locked where it lies:
    torch's allocator of pinned memory rounds up to powers of two, and torch 2.11 has no setting against that."""
    return locked(torch.empty(size_bytes, dtype=torch.uint8), pinned=pinned)


def locked(buffer: Tensor, *, pinned: bool) -> Tensor:
    """Return ``buffer``; if it is to be ``pinned``, its memory is locked until this tensor is gone."""
    if pinned and buffer.nbytes:
        cuda: Any = torch.cuda.cudart()
        torch.cuda.check_error(int(cuda.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)))
        weakref.finalize(buffer, _unlock, buffer.data_ptr()).atexit = False
    return buffer


def _unlock(address: int) -> None:
    """Unlock the memory at ``address``, once the GPU has done its work: a copy that is still on its way would read or
    write memory that is no longer there, which ends the process's work on the GPU (`unspecified launch failure`,
    wherever it is asked for something next)."""
    cuda: Any = torch.cuda.cudart()
    torch.cuda.synchronize()
    cuda.cudaHostUnregister(address)


def beside(*, pinned: bool) -> ThreadPoolExecutor:
    """A thread; with memory that is ``pinned`` for a GPU, one that works for this GPU: it would begin on the first, and
    make a context there."""
    if not pinned:
        return ThreadPoolExecutor(1)
    return ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),))
