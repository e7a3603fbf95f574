"""Ranks on this machine: started together, stopped together, none left behind.

They find one another through a file that only this user can open (docs/decisions/0009), so the launcher listens on no
port and needs no torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from shardwise.errors import Problem, ShardwiseError, lacked
from shardwise.launch.launchers import Ended as Ended
from shardwise.launch.launchers import Launch
from shardwise.launch.worker import LAUNCHER, STORE
from shardwise.runtime.checkpoint.manifest import train_again
from shardwise.runtime.faults.outcome import Exit, clear_exit, read_exit, write_exit
from shardwise.runtime.faults.signals import received
from shardwise.spec.cgroup import oom_kills
from shardwise.spec.host import cores, total_memory_bytes
from shardwise.spec.safe_path import SAFE_PATH
from shardwise.spec.units import show_bytes

SAVE_AND_STOP_S = 600.0
"""How long ranks may take to save after SIGTERM, Ctrl-C, SIGHUP or SIGUSR1."""
AFTER_FAILURE_S = 30.0
"""How long the other ranks may take to end once one has failed."""
POLL_S = 0.05
TWICE_S = 1.0
"""A second Ctrl-C that comes sooner is taken to be the first one, delivered twice."""


@dataclass(frozen=True)
class Failure:
    """A rank that failed: its exit code, or minus the signal that killed it; of one that did not end in time, and was
    killed here, minus the signal by which it was asked to."""

    exit_code: int
    pid: int
    time_s: float


def launch(asked: Launch) -> Ended:
    """Run the ranks on this machine, and wait for them."""
    return run_ranks(asked.words, asked.nproc, asked.directory, saves=asked.saves)


def run_ranks(
    arguments: Sequence[str], nproc: int, run_directory: Path, module: str = "shardwise", *, saves: bool = True
) -> Ended:
    """Run ``python -m <module> <arguments>`` as ``nproc`` ranks and wait for them. When asked to stop they may save
    first, if they are ranks that have something to save (``saves``).

    Exit code and cause come from the ranks' ``exit.json``. A killed rank could not write one; for it the signal is
    reported.
    """
    clear_exit(run_directory)
    kills = oom_kills()
    command = [sys.executable, "-u", "-m", module, *arguments]
    asked = Requests(saves)
    temporary = tempfile.TemporaryDirectory(prefix="shardwise-", ignore_cleanup_errors=True)
    with temporary as private, received(asked.receive):  # what is ignored here is in the ranks too: they inherit that
        failures = together(command, [_environment(rank, nproc, f"{private}/store") for rank in range(nproc)], asked)
        told = read_exit(Path(private)) or read_exit(run_directory)  # the first is there if the run's disk is full
    if asked.again:
        return Ended(128 + signal.SIGINT)
    if asked.first is not None:
        return _stopped(asked.first, told, run_directory)
    return _failed(failures, told, run_directory, kills) if failures else Ended(0)


def _environment(rank: int, nproc: int, store: str) -> dict[str, str]:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, LAUNCHER: os.getpid()}
    return environment(nproc, places | {STORE: store})


def environment(nproc: int, places: Mapping[str, object]) -> dict[str, str]:
    """Return the environment of one of ``nproc`` ranks of this machine: ours, with its ``places`` among all."""
    defaults = {"OMP_NUM_THREADS": str(max(1, cores() // nproc)), "TOKENIZERS_PARALLELISM": "false"}
    return defaults | os.environ | {name: str(value) for name, value in places.items()} | SAFE_PATH


def together(
    command: Sequence[str],
    environments: Sequence[dict[str, str]],
    asked: Requests,
    others: Callable[[], Literal["", "save", "end"]] = lambda: "",
) -> dict[int, Failure]:
    """Run ``command`` once in each of the environments, and return those that failed when all have ended; none is left
    behind. ``others``: whether ranks elsewhere want these to save and end, or to end."""
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for each in environments:
            ranks.append(subprocess.Popen(command, env=each))
        return _watch(ranks, asked, others)
    finally:
        _send(ranks, signal.SIGKILL)


class Requests:
    """The requests to this process to stop: ``first`` by SIGTERM, Ctrl-C, SIGHUP (its terminal closed) or SIGUSR1
    (Slurm's warning), ``again`` by a second Ctrl-C."""

    def __init__(self, saves: bool) -> None:
        self.saves = saves
        self.first: signal.Signals | None = None
        self.again = False
        self._first_s = 0.0

    def receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self._first_s = signal.Signals(number), now
            hint = "; a second Ctrl-C stops at once" if number == signal.SIGINT else ""
            if self.saves:
                _say(f"{self.first.name}: saving, then stopping{hint}")
        elif number == signal.SIGINT and now - self._first_s > TWICE_S:
            self.again = True


def _say(line: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f"{line}\n".encode())


def _watch(
    ranks: Sequence[subprocess.Popen[bytes]], asked: Requests, others: Callable[[], Literal["", "save", "end"]]
) -> dict[int, Failure]:
    """Wait until every rank has ended; returns those that failed. A request to stop, of this process or of ``others``,
    is passed on once, and the ranks get time to save; when one rank fails, the others are asked to end. A rank that
    does not end in time is killed; a second request kills all."""
    running, failures = dict(enumerate(ranks)), dict[int, Failure]()
    told, deadline_s = False, float("inf")
    while running:
        for rank, process in list(running.items()):
            code = process.poll()
            if code is not None:
                del running[rank]
            if code:
                failures[rank] = Failure(code, process.pid, time.monotonic())
        wanted = "" if told or not running else others()
        if not told and (asked.first is not None or failures or wanted):
            told = True
            saves = (asked.first and asked.saves) or (wanted == "save" and not failures)
            deadline_s = time.monotonic() + (SAVE_AND_STOP_S if saves else AFTER_FAILURE_S)
            _send(running.values(), asked.first or signal.SIGTERM)
        if asked.again or time.monotonic() > deadline_s:
            if asked.again:
                _say("stopped by a second Ctrl-C without saving once more")
            _send(running.values(), signal.SIGKILL)
            return failures | _late(running, asked.first or signal.SIGTERM)
        time.sleep(POLL_S if running else 0.0)
    return failures


def _late(killed: Mapping[int, subprocess.Popen[bytes]], number: signal.Signals) -> dict[int, Failure]:
    """Return those of the ``killed`` ranks that failed: all but one that has ended well just before."""
    now_s = time.monotonic()
    codes = {rank: -number if each.returncode == -signal.SIGKILL else each.returncode for rank, each in killed.items()}
    return {rank: Failure(code, killed[rank].pid, now_s) for rank, code in codes.items() if code}


def _send(ranks: Collection[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in ranks:
        process.send_signal(number)
    if number == signal.SIGKILL:
        for process in ranks:
            process.wait()


def _failed(failures: dict[int, Failure], outcome: Exit | None, run_directory: Path, kills: int | None) -> Ended:
    """The first failure. One killed by a signal wrote nothing, and what others wrote about it is only a consequence.
    ``kills``: of the kernel's, for memory, before the ranks were started."""
    rank, first = first_of(failures)
    killed = {r: f for r, f in failures.items() if f.exit_code < 0 and f.exit_code != -signal.SIGTERM}
    if killed and (outcome is None or outcome.kind == "peer_lost" or outcome.rank in killed):
        rank, first = min(killed.items(), key=lambda item: item[1].time_s)
        now = oom_kills()
        problem = _killed(rank, first, run_directory, kills, now)
        told = Exit("crash", 1, problem.what, rank, pid=first.pid, problems=[asdict(problem)], restartable=True)
        with suppress(OSError):  # of a full disk
            write_exit(run_directory, told)
        return Ended(1, problem, "host" if _for_memory(first, kills, now) else "")
    if outcome is not None:
        cause = _cause(outcome)
        training = outcome.kind == "memory" and outcome.phase  # what has no phase is written before a rank trains
        return Ended(outcome.exit_code, cause, lacked(cause.what) if cause and training else "")
    what = f"rank {rank} (pid {first.pid}) ended with exit code {first.exit_code}; what it printed is above"
    fix = f"run again with --debug, or `{train_again(run_directory)}`"
    return Ended(first.exit_code if first.exit_code > 0 else ShardwiseError.exit_code, Problem("RUN004", what, "", fix))


def first_of(failures: Mapping[int, Failure]) -> tuple[int, Failure]:
    """Return the rank that failed first. One that ended by SIGTERM was asked to, because another had failed."""
    return min(failures.items(), key=lambda item: (item[1].exit_code == -signal.SIGTERM, item[1].time_s))


def _for_memory(failure: Failure, kills: int | None, now: int | None) -> bool:
    """Return whether the kernel has killed a rank for memory: ``now`` it has killed more than before."""
    return failure.exit_code == -signal.SIGKILL and None not in (kills, now) and now != kills


def _killed(rank: int, failure: Failure, run_directory: Path, kills: int | None, now: int | None) -> Problem:
    number = signal.Signals(-failure.exit_code)
    what = f"rank {rank} (pid {failure.pid}) was killed by {number.name}"
    fix = f"`{train_again(run_directory)}` goes on from the newest checkpoint, if there is one"
    less = "train.micro_batch_size=1, recompute=full or a smaller --nproc needs less"
    if number == signal.SIGKILL and (kills is None or now is None):
        fix = f"if the kernel ran out of memory (dmesg says so), {less}; {fix}"
    elif number == signal.SIGKILL and not _for_memory(failure, kills, now):
        what += " by another process or user: the kernel killed nothing for lack of memory"
    elif number == signal.SIGKILL:
        allowed = show_bytes(total_memory_bytes())
        what += f" (exit code 137): memory ran out, and the kernel killed it; {allowed} is all there is here"
        fix = f"{less}; {fix}"
    return Problem("RUN004", what, f"{run_directory}", fix)


def _cause(outcome: Exit) -> Problem | None:
    if outcome.exit_code == 0:
        return None
    if outcome.problems:
        first = outcome.problems[0]
        place = f"rank {outcome.rank}" + (f", step {outcome.step}" if outcome.step else "")
        where = f"{first.get('where', '')} ({place})".strip()
        return Problem(first.get("code", "RUN004"), first.get("what", outcome.message), where, first.get("fix", ""))
    return Problem("RUN004", outcome.message, f"rank {outcome.rank} on {outcome.host}, step {outcome.step}")


def _stopped(received: signal.Signals, outcome: Exit | None, run_directory: Path) -> Ended:
    if outcome is not None:
        return Ended(outcome.exit_code, _cause(outcome))
    what = f"stopped by {received.name} before the ranks could save"
    return Ended(128 + received, Problem("RUN005", what, f"{run_directory}", train_again(run_directory)))
