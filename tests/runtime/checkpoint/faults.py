"""Faults at the n-th system call of a save, and the writer that must not survive them. No torch here."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
from pathlib import Path
from typing import Any

from shardwise.runtime.checkpoint import commit
from shardwise.runtime.checkpoint.manifest import MANIFEST, Manifest, dump, step_name


def faulty(disk: commit.Disk, fault: str, at: int, counter: list[str]) -> commit.Disk:
    """``disk`` whose ``at``-th call (from 1) dies or fails: kill, torn (half a write, then death), an errno, or an
    errno and ``for good``, which every call from there on gets.

    ``counter`` collects the name of every call, so that its length tells how far it came.
    """

    def seam(name: str, call: Any) -> Any:
        def counted(*args: Any) -> Any:
            counter.append(name)
            if len(counter) == at or (0 < at < len(counter) and fault.endswith("for good")):
                if fault == "torn" and name == "write":
                    os.write(args[0], args[1][: len(args[1]) // 2])
                if fault in ("kill", "torn"):
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault.startswith("E"):
                    number = getattr(errno, fault.split()[0])
                    raise OSError(number, os.strerror(number))
            return call(*args)

        return counted

    calls = {f.name: seam(f.name, getattr(disk, f.name)) for f in dataclasses.fields(disk)}
    return commit.Disk(**calls)


def naive_begin(directory: Path, step: int, generation: int, need_bytes: int, disk: commit.Disk) -> commit.Attempt:
    """What most programs do: write where the checkpoint is to be found."""
    path = directory / step_name(step)
    disk.mkdir(path)
    return commit.Attempt(directory, path, step, generation, os.open(path, os.O_RDONLY))


def naive_publish(attempt: commit.Attempt, manifest: Manifest, disk: commit.Disk) -> Path:
    commit.write_file(attempt.path / MANIFEST, [memoryview(dump(manifest))], disk)
    attempt.release()
    return attempt.path
