"""Whether files can be written in a directory, asked before any work."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from shardwise.errors import OutputError, Problem


def check_writable(directory: Path, option: str = "--out") -> None:
    """Create ``directory``, which ``option`` names, and check that files there can be written, synced and renamed.
    Raises OutputError (OUT002)."""
    probe, renamed = directory / f".probe-{os.getpid()}", directory / f".probe-{os.getpid()}-renamed"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as stream:
            stream.write(b"\0" * 4096)
            stream.flush()
            os.fsync(stream.fileno())
        probe.rename(renamed)
        renamed.unlink()
    except OSError as error:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
        raise OutputError(unwritable(directory, error, option)) from None


def unwritable(directory: Path, error: OSError, option: str = "--out") -> Problem:
    """The problem (OUT002) of ``directory``, which ``option`` names, where a write ended with ``error``."""
    reasons = {
        errno.EROFS: "read-only file system",
        errno.ENOSPC: "no space left",
        errno.EDQUOT: "over the disk quota",
        errno.EFBIG: "a file would be larger than `ulimit -f` allows",
        errno.EACCES: "permission denied",
        errno.EPERM: "permission denied",
        errno.EEXIST: "it is a file",
        errno.ENOTDIR: "part of the path is a file",
        errno.ENAMETOOLONG: "the name is too long",
    }
    reason = reasons.get(error.errno or 0, error.strerror or str(error))
    shown = str(directory) if len(str(directory)) < 200 else f"{str(directory)[:100]}..."
    fix = f"`{option}` a directory that can be written (checked by a probe file, fsync and rename)"
    return Problem("OUT002", f"cannot write {shown}: {reason}", shown, fix)


def nearest(directory: Path) -> Path:
    """``directory``, or its nearest parent that exists."""
    while not directory.exists():
        directory = directory.parent
    return directory
