"""The commit of a checkpoint, which becomes visible whole, or not at all. No torch here; every call that changes the
disk is in Disk.

    begin     sweep what dead attempts left, mkdir .tmp-step-00000400-g7/       (first rank)
    write     every file O_EXCL, hashed while it is written, fsync               (every rank)
    publish   manifest.json last, fsync the directory, rename to step-00000400/, fsync the parent   (first rank)

A generation is claimed once per process group by creating a file: the one with the highest number may commit, so a
frozen worker of an earlier attempt that wakes up cannot. Nothing that has its final name is ever written to.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import OutputError, Problem
from shardwise.runtime.checkpoint import manifest as manifests
from shardwise.runtime.checkpoint.manifest import MANIFEST, FileRecord, Manifest, Rejected

_ATTEMPT = re.compile(r"\.tmp-step-\d{8,}-g(\d+)")
_GENERATION = re.compile(r"\.generation-(\d+)")
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True)
class Disk:
    """The system calls of a save, in one place, so that a test can count them, fail the n-th, or die there."""

    open: Callable[..., int] = os.open
    write: Callable[[int, memoryview], int] = os.write
    fsync: Callable[[int], None] = os.fsync
    mkdir: Callable[[Path], None] = os.mkdir
    rename: Callable[[Path, Path], None] = os.rename
    unlink: Callable[[Path], None] = os.unlink
    rmdir: Callable[[Path], None] = os.rmdir


DISK = Disk()


class MaybeCommitted(Exception):
    """The rename was done, but the disk did not confirm it: after a power loss the checkpoint may or may not be
    there."""


@dataclass(frozen=True)
class Attempt:
    """A save in progress: its temporary directory, and a lock on it that dies with this process."""

    directory: Path
    path: Path
    step: int
    generation: int
    lock: int

    def release(self) -> None:
        os.close(self.lock)


def claim(directory: Path, disk: Disk = DISK) -> int:
    """Take the next generation number in ``directory`` (made if need be); from now on no lower one may commit."""
    if not directory.is_dir():
        os.makedirs(directory, exist_ok=True)
        fsync_directory(directory.parent, disk)
    number = max(generations(directory), default=0)
    while True:
        number += 1
        with suppress(FileExistsError):
            os.close(disk.open(directory / f".generation-{number}", _NEW_FILE, 0o644))
            break
    for older in generations(directory):
        if older < number:
            (directory / f".generation-{older}").unlink(missing_ok=True)
    return number


def generations(directory: Path) -> list[int]:
    """The numbers that were claimed and not yet superseded."""
    return [int(match[1]) for name in os.listdir(directory) if (match := _GENERATION.fullmatch(name))]


def begin(directory: Path, step: int, generation: int, need_bytes: int, disk: Disk = DISK) -> Attempt:
    """Make the temporary directory of a save of ``need_bytes``.

    Raises OutputError: a newer generation owns the directory, the step is there already (and verifies; one that does
    not is set aside in quarantine/), or the disk has not the space.
    """
    _check_owner(directory, generation)
    sweep(directory, generation, disk)
    _make_way(directory, step, generation, disk)
    free, needed = shutil.disk_usage(directory).free, need_bytes * 1.05
    if free < needed:
        what = f"the checkpoint of step {step} needs {needed / 1e9:.3f} GB, {free / 1e9:.3f} GB are free"
        raise OutputError(Problem("OUT003", what, str(directory), "free space, or lower checkpoint.save_total_limit"))
    path = directory / f".tmp-{manifests.step_name(step)}-g{generation}"
    disk.mkdir(path)
    lock = os.open(path, _FOLDER)
    with suppress(OSError):  # some network file systems know no locks: there the generation alone decides
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return Attempt(directory, path, step, generation, lock)


def write_file(path: Path, blocks: Sequence[memoryview], disk: Disk = DISK) -> FileRecord:
    """Write ``blocks`` one after another into a new file, and sync it to disk. Raises FileExistsError if the file
    exists, OSError if the disk fails.
    """
    with manifests.opened(disk.open(path, _NEW_FILE, 0o644)) as descriptor:
        record = manifests.chunk_hashes(_written(descriptor, blocks, disk))
        disk.fsync(descriptor)
    return record


def _written(descriptor: int, blocks: Sequence[memoryview], disk: Disk) -> Iterator[memoryview]:
    for block in blocks:
        for begin in range(0, len(block), manifests.CHUNK_BYTES):
            part = block[begin : begin + manifests.CHUNK_BYTES]
            yield part
            while len(part):
                part = part[disk.write(descriptor, part) :]


def publish(attempt: Attempt, manifest: Manifest, disk: Disk = DISK) -> Path:
    """Commit: after this returns the checkpoint survives a power loss. Returns its directory.

    Raises MaybeCommitted if only the last confirmation failed; whatever else is raised, nothing became visible.
    """
    target = attempt.directory / manifests.step_name(attempt.step)
    write_file(attempt.path / MANIFEST, [memoryview(manifests.dump(manifest))], disk)
    fsync_directory(attempt.path, disk)
    _check_owner(attempt.directory, attempt.generation)
    if os.path.lexists(target):
        raise _exists(target)
    try:
        disk.rename(attempt.path, target)
    except OSError:  # a network file system may have renamed it and lost its answer
        if os.path.lexists(attempt.path) or not os.path.lexists(target):
            raise
    try:
        fsync_directory(attempt.directory, disk)
        attempt.release()
    except OSError as error:
        raise MaybeCommitted(f"{target.name} was renamed, but its directory could not be synced: {error}") from error
    return target


def abandon(attempt: Attempt, disk: Disk = DISK) -> None:
    """Remove a failed attempt, as far as the disk allows; the next save removes the rest. After MaybeCommitted the
    attempt has its final name, and stays.
    """
    try:
        with suppress(OSError):
            if os.path.lexists(attempt.path):
                discard(attempt.path, disk)
    finally:
        attempt.release()


def sweep(directory: Path, generation: int, disk: Disk = DISK) -> None:
    """Remove the remains of dead attempts and unfinished deletions. An attempt that a live process has locked stays."""
    for name in sorted(os.listdir(directory)):
        path = directory / name
        match = _ATTEMPT.fullmatch(name)
        try:
            if match and _dead(path, older=int(match[1]) < generation):
                discard(path, disk)
            elif name.startswith(".trash-"):
                remove_tree(path, disk)
        except OSError:
            continue  # a leftover only costs space, so the save must not fail because of it


def discard(path: Path, disk: Disk = DISK) -> None:
    """Delete a directory so that it is never seen half deleted under its own name."""
    trash = path.with_name(f".trash-{path.name.lstrip('.')}")
    if os.path.lexists(trash):
        remove_tree(trash, disk)
    disk.rename(path, trash)
    remove_tree(trash, disk)


def remove_tree(path: Path, disk: Disk = DISK) -> None:
    """Delete a directory and all in it; a link, not what it points to."""
    if path.is_symlink():
        return disk.unlink(path)
    for folder, folders, files in os.walk(path, topdown=False):
        for name in files:
            disk.unlink(Path(folder, name))
        for name in folders:
            inner = Path(folder, name)
            disk.unlink(inner) if inner.is_symlink() else disk.rmdir(inner)
    disk.rmdir(path)


def fsync_directory(path: Path, disk: Disk = DISK) -> None:
    """Sync the directory ``path``, so that its entries survive a power loss."""
    with manifests.opened(os.open(path, _FOLDER)) as descriptor:
        disk.fsync(descriptor)


def _check_owner(directory: Path, generation: int) -> None:
    newest = max(generations(directory), default=generation)
    if newest > generation:
        what = f"a newer process owns this run: generation {newest}, this one is {generation}"
        raise OutputError(Problem("OUT005", what, str(directory), "stop this one, or give it another run.name"))


def _make_way(directory: Path, step: int, generation: int, disk: Disk) -> None:
    target = directory / manifests.step_name(step)
    if not os.path.lexists(target):
        return
    try:
        manifests.check(target)
    except Rejected:
        aside = directory / "quarantine" / f"{target.name}-g{generation}"
        if not aside.parent.is_dir():
            disk.mkdir(aside.parent)
        disk.rename(target, aside)
        return
    raise _exists(target)


def _exists(target: Path) -> OutputError:
    return OutputError(Problem("OUT001", f"{target.name} exists already; it is not overwritten", str(target)))


def _dead(path: Path, older: bool) -> bool:
    with manifests.opened(os.open(path, _FOLDER)) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return older
    return True
