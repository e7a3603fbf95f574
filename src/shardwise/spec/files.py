"""Opens and reads what somebody else may have put there: regular files only, for opening a named pipe would block for
ever, and no more of them than such a file can be."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from shardwise.errors import PolicyError, Problem

NOTE_BYTES = 2**24
"""Of what a process notes down about itself (run.json, exit.json, an owner's file), and of configurations."""
TABLE_BYTES = 2**28
"""Of what grows with a model or a vocabulary: indices of weights, tokenizers."""
MANIFEST_BYTES = 2**31
"""Of what lists the slices of every rank, or the files of a data set: some seventeen million of them."""
LOG_BYTES = 2**31
"""Of what grows with the steps of a run: metrics.jsonl, events.jsonl. Some four million lines."""
LINE_BYTES = 2**20


def regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file, as ``os.open`` gives it, at once. Raises OSError for a pipe, a device or a
    directory."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, not a regular file", str(path))


def kind_of(mode: int) -> str:
    """Name the kind of a file that is no regular one, by its ``mode`` in ``stat``."""
    words = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a directory", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    return words.get(stat.S_IFMT(mode), "something else")


def open_regular(path: str | Path) -> BinaryIO:
    """``open(path, "rb")`` of a regular file."""
    return open(path, "rb", opener=regular)


def inside(directory: Path, name: str, where: Path, *also: Path) -> Path:
    """The file of ``directory`` that something read from the disk (``where``) calls ``name``, perhaps in a folder of
    it. Raises PolicyError (SEC006) for a name, or a link, that leads out of it (and of ``also``); OSError, ValueError
    or RuntimeError for one that no file can have: thousands of characters, a zero byte, links in a circle."""
    path, parts = directory / name, Path(name).parts
    real, root = path.resolve(), directory.resolve()
    if Path(name).is_absolute() or ".." in parts or not any(map(real.is_relative_to, (root, *also))):
        shown = name if len(name) <= 200 else f"{name[:200]}... ({len(name):,} characters)"
        what = f"file name {shown!r} leaves the directory {directory}"
        raise PolicyError(Problem("SEC006", what, str(where), "fetch the directory again, or make it anew"))
    with suppress(FileNotFoundError, NotADirectoryError):
        os.stat(path)
    return path


def read_regular(path: str | Path, most_bytes: int = TABLE_BYTES) -> bytes:
    """Read all of a regular file. Raises OSError (EOVERFLOW) for one larger than ``most_bytes``, of which nothing is
    read: a sparse file of a terabyte takes no room on a disk."""
    with open_regular(path) as file:
        check_size(file, path, most_bytes)
        return file.read()


def regular_lines(path: str | Path) -> Iterator[bytes]:
    """The lines of a log, each with its end. Raises OSError as :func:`read_regular`; a line of more than a MiB, which
    none is, comes in pieces."""
    with open_regular(path) as file:
        check_size(file, path, LOG_BYTES)
        while line := file.readline(LINE_BYTES):
            yield line


def check_size(file: BinaryIO, path: str | Path, most_bytes: int) -> None:
    """Raise OSError (EOVERFLOW) for an open file that is larger than ``most_bytes``."""
    if os.fstat(file.fileno()).st_size > most_bytes:
        raise OSError(errno.EOVERFLOW, f"it is larger than {most_bytes:,} bytes (limit)", str(path))
