"""Files and directories that are there whole or not at all, made by one process at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex


def once(target: Path, make: Callable[[Path], None]) -> Path:
    """``target``, a directory: there already, or made by ``make(directory)``, by one of those who want it."""
    if not target.is_dir():
        with lock(target):
            if not target.is_dir():
                with becoming(target) as directory:
                    make(directory)
    return target


@contextmanager
def lock(target: Path) -> Iterator[None]:
    """Hold the lock of ``target``; waits for whoever holds it. The lock file stays: removing it would let two in."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def becoming(target: Path) -> Iterator[Path]:
    """A directory that becomes ``target`` when the block ends well, and vanishes when it does not. Hold the lock."""
    temporary = target.parent / f".{target.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        _sync(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if target.exists():
        old = target.parent / f".{target.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        temporary.rename(target)
        shutil.rmtree(old)
    else:
        temporary.rename(target)
    _sync(target.parent, inside=False)


def _sync(directory: Path, inside: bool = True) -> None:
    """Bring a directory's entries, and what is inside, to the disk."""
    for path in [directory, *(directory.rglob("*") if inside else ())]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is never seen half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{token_hex(6)}")  # a cache may be shared by machines
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
