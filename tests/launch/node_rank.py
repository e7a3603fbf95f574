"""A rank of one node of several, without torch: ``node_rank <directory> <deed>``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

PLACES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def main(directory: Path, deed: str) -> int:
    """The exit code."""
    asked: list[int] = []
    if deed == "save":
        signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    local = os.environ["LOCAL_RANK"]
    (directory / f"rank-{local}").write_text(" ".join(os.environ[name] for name in PLACES))
    while not (directory / f"rank-{1 - int(local)}").exists():
        time.sleep(0.01)
    if deed == "fine":
        return 0
    if deed == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (directory / f"deaf-{local}").touch()
        while not (directory / f"deaf-{1 - int(local)}").exists():
            time.sleep(0.01)
        if local == "0":
            os.kill(os.getppid(), signal.SIGTERM)
    if local == "0" and deed == "fail":
        return 78
    if local == "0" and deed == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "asked" and local == "0":
        os.kill(os.getppid(), signal.SIGTERM)
    if deed == "warned" and local == "0":  # by Slurm
        os.kill(os.getppid(), signal.SIGUSR1)
    if deed == "save" and local == "0":
        os.kill(os.getppid(), signal.SIGTERM)
    end = time.monotonic() + 20
    while not asked and time.monotonic() < end:
        time.sleep(0.01)
    return 75 if asked else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
