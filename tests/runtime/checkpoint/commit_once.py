"""Save one small checkpoint with the commit protocol (or the naive way), to be killed on the way. No torch here.

python -m tests.runtime.checkpoint.commit_once DIRECTORY      for strace
"""

from __future__ import annotations

import sys
from pathlib import Path

from shardwise.runtime.checkpoint import commit
from shardwise.runtime.checkpoint.manifest import Manifest
from tests.runtime.checkpoint.faults import faulty, naive_begin, naive_publish

BYTES = 300_000


def save(directory: Path, step: int, disk: commit.Disk, naive: bool = False) -> None:
    begin, publish = (naive_begin, naive_publish) if naive else (commit.begin, commit.publish)
    generation = commit.claim(directory, disk)
    attempt = begin(directory, step, generation, 2 * BYTES, disk)
    files = {}
    for name in ("a", "b"):
        body = memoryview(bytes([step]) * BYTES)
        files[name] = commit.write_file(attempt.path / name, [body[:8], body[8:]], disk)
    publish(attempt, Manifest("run", step, generation, 1, files, {}), disk)


def run(rank: int, world: int, directory: str, naive: bool, fault: str = "", at: int = 0) -> list[str]:
    """Save step 2; the system calls made."""
    made: list[str] = []
    save(Path(directory), 2, faulty(commit.DISK, fault, at, made), naive)
    return made


if __name__ == "__main__":
    run(0, 1, sys.argv[1], naive=False)
