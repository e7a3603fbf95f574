"""A rank without torch of a node that meets others: ``meeting_rank <directory> <deed>``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from shardwise.launch.worker import WITH_MEETING
from shardwise.runtime.faults.outcome import Exit, write_exit
from tests.launch.node_rank import PLACES


def main(directory: Path, deed: str) -> int:
    """The exit code."""
    (directory / "place").write_text(" ".join(os.environ[name] for name in PLACES))
    assert os.environ[WITH_MEETING] == str(os.getppid())
    tries = directory / "tries"
    with tries.open("a") as file:
        file.write(".")
    if deed in ("again", "hung") and len(tries.read_text()) > 1:
        return 0
    if deed in ("again", "always"):
        write_exit(directory, Exit("peer_lost", 1, "Connection closed by peer", restartable=True))
        return 1
    if deed == "bits":
        problem = {"code": "SDC001", "what": "rank 0 has other bits"}
        write_exit(directory, Exit("error", 1, "other bits", problems=[problem], restartable=True))
        return 1
    if deed == "hung":  # and another rank has killed it for that
        write_exit(directory, Exit("hang", 1, "rank 0 hangs", restartable=True))
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "hangs":
        if len(tries.read_text()) > 1:
            return 0
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (directory / "deaf").touch()
        time.sleep(20)
    if deed == "fails":
        write_exit(directory, Exit("error", 78, "unknown key"))
        return 78
    if deed == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "asked":
        signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(75))
        os.kill(os.getppid(), signal.SIGUSR1)
    if deed == "preempted":  # it was asked itself, and its node was not
        return 75
    time.sleep(20 if deed == "asked" else 0)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
