"""Files and directories that exist completely or not at all, each written by one process at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex


def once(target: Path, make: Callable[[Path], None]) -> Path:
    """The directory ``target``. If it does not exist, one of the processes that ask for it calls
    ``make(directory)``. Its parent must hold nothing else than what is made so."""
    if not target.is_dir():
        with lock(target, tidy=True):
            if not target.is_dir():
                with becoming(target) as directory:
                    make(directory)
    return target


@contextmanager
def lock(target: Path, tidy: bool = False) -> Iterator[None]:
    """Hold the lock of ``target``, waiting for it if needed. The lock file is never removed: two processes could then
    hold the lock. ``tidy``: what others left unfinished beside it is removed; not in a directory that a user names."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if tidy:
            _remove_unfinished(target.parent)
        yield


def _remove_unfinished(parent: Path) -> None:
    """Delete what processes that were killed have left in ``parent`` half made, or replaced: what nobody holds the lock
    of."""
    for suffix in ("tmp", "old"):
        for left in parent.glob(f".*.{suffix}"):
            lock_file = left.with_suffix(".lock")
            with suppress(OSError), lock_file.open("r+") as file:  # without a lock file it is none of ours
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _delete(left)


@contextmanager
def becoming(target: Path, synced: bool = True) -> Iterator[Path]:
    """A temporary directory that replaces ``target`` if the block succeeds and is deleted if it raises. The caller must
    hold the lock, where others may do the same. ``synced``: all of it is on the disk before it replaces anything."""
    temporary = target.parent / f".{target.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        if synced:
            _sync(temporary)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno and not error.filename:  # as of a write to an open file
            error.filename = str(target)
        raise
    old = target.parent / f".{target.name}.old"
    _delete(old)
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    _delete(old)
    if synced:
        _sync(target.parent, inside=False)


def _delete(directory: Path) -> None:
    """Delete as much of ``directory`` as can be deleted; of a link to one only the link."""
    if directory.is_symlink():
        directory.unlink()
    shutil.rmtree(directory, ignore_errors=True)


def _sync(directory: Path, inside: bool = True) -> None:
    """``fsync`` a directory and, with ``inside``, everything in it."""
    for path in [directory, *(directory.rglob("*") if inside else ())]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{token_hex(6)}")  # a cache may be shared by machines
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
