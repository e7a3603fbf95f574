"""A rank that needs no torch: what the launcher starts in its tests. ``fake_rank <directory> <what is done>``; every
rank writes a file, then the last ones wait for long enough to be killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from shardwise.launch.worker import STORE, die_with_launcher, launcher_directory, rank
from shardwise.runtime.faults.outcome import Exit, write_exit
from shardwise.runtime.faults.signals import heeded


def main(directory: Path, deed: str) -> int:
    """The exit code."""
    die_with_launcher()
    names = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", STORE)
    (directory / f"rank-{rank()}").write_text(f"{os.getpid()} " + " ".join(f"{n}={os.environ[n]}" for n in names))
    while not (directory / f"rank-{1 - rank()}").exists():
        time.sleep(0.02)
    problem = {"code": "CFG001", "what": "unknown key `x`", "where": "r.yaml:1", "fix": "remove it"}
    if deed == "stop":
        return stop_when_asked(directory)
    if deed == "fine":
        return 0
    if deed == "full":  # where the run is, nothing can be written; both ranks say so
        room = launcher_directory()
        assert room is not None
        problems = [{"code": "OUT002", "what": "cannot write x: no space left", "where": "x", "fix": "make room there"}]
        write_exit(room, Exit("error", 73, "cannot write x", rank=rank(), problems=problems))
        return 73
    if rank() == 0 and deed == "fail":
        write_exit(directory, Exit("error", 78, "unknown key", rank=0, step=7, problems=[problem]))
        return 78
    if rank() == 0 and deed == "vanish":
        return 5
    if rank() == 0 and deed == "killed":
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank() == 0 and deed.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[deed])
    if deed == "killed":
        write_exit(directory, Exit("peer_lost", 1, "Connection closed by peer", rank=rank()))
    time.sleep(60)
    return 1


def stop_when_asked(directory: Path) -> int:
    """Count the requests for a second, as a rank that saves would; then end as preempted."""
    asked: list[int] = []
    for number in heeded((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)):
        signal.signal(number, lambda got, frame: asked.append(got))
    (directory / f"ready-{rank()}").touch()
    while not asked:
        time.sleep(0.02)
    time.sleep(0.5)
    (directory / f"asked-{rank()}").write_text(" ".join(map(str, asked)))
    problem = {"code": "STOP001", "what": "saved at step 3", "where": "", "fix": "start it again"}
    write_exit(directory, Exit("preempted", 75, "saved", rank=rank(), problems=[problem]))
    return 75


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
