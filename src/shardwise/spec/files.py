"""Opens regular files only: opening a named pipe that somebody put in place of a file would block for ever."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file, as ``os.open`` gives it, at once. Raises OSError for a pipe, a device or a
    directory."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    words = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a directory", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    kind = words.get(stat.S_IFMT(mode), "something else")
    raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def open_regular(path: str | Path) -> BinaryIO:
    """``open(path, "rb")`` of a regular file."""
    return open(path, "rb", opener=regular)


def read_regular(path: str | Path) -> bytes:
    """All of a regular file."""
    with open_regular(path) as file:
        return file.read()
