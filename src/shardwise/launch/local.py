"""Ranks on this machine, through torch's elastic agent: started together, stopped together, none left behind."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from shardwise.errors import Problem, ShardwiseError
from shardwise.launch.worker import LAUNCHER
from shardwise.runtime.outcome import Exit, clear_exit, read_exit, write_exit
from shardwise.spec.host import cores

SAVE_AND_STOP_S = 600
"""How long ranks may take to save after SIGTERM or Ctrl-C; a second Ctrl-C ends the launcher, and with it the ranks."""


@dataclass(frozen=True)
class Ended:
    """How the ranks ended. ``problem`` is the first failing rank's cause."""

    exit_code: int
    problem: Problem | None = None


def launch(
    arguments: Sequence[str], nproc: int, run_directory: Path, port: int = 0, module: str = "shardwise"
) -> Ended:
    """Run ``python -m <module> <arguments>`` as ``nproc`` ranks and wait for them.

    torchrun's own exit code is 1 for everything, so the code and the cause come from the workers' ``exit.json``; a
    rank that was killed could not write one, and is named by the signal.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    clear_exit(run_directory)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=f"shardwise-{uuid.uuid4().hex[:12]}",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=SAVE_AND_STOP_S,
        signals_to_handle="SIGHUP,SIGQUIT",
    )
    _silence_agent()
    with _inherited(nproc), _asked(SignalException):
        try:
            elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
        except ChildFailedError as error:
            return _failed(error.failures, run_directory)
        except SignalException as error:
            return _stopped(signal.Signals(error.sigval), run_directory)
    return Ended(0)


@contextmanager
def _inherited(nproc: int) -> Iterator[None]:
    """Give the ranks their environment; afterwards this process has its own back, and its signal handlers."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    signals = {number: signal.getsignal(number) for number in numbers}
    before = dict(os.environ)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // nproc)))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        if threading.current_thread() is threading.main_thread():
            for number, previous in signals.items():
                signal.signal(number, previous)


@contextmanager
def _asked(stop: Callable[[str, signal.Signals], BaseException]) -> Iterator[None]:
    """The first SIGTERM or Ctrl-C makes the agent pass it on and wait until the ranks have saved. A second Ctrl-C, at
    least a second later, ends this process at once, and with it the ranks (worker.die_with_launcher). The agent's own
    treatment would interrupt its waiting by a second waiting."""
    first_s: list[float] = []

    def receive(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not first_s:
            first_s.append(now)
            hint = "; a second Ctrl-C stops at once" if number == signal.SIGINT else ""
            os.write(2, f"{signal.Signals(number).name}: saving, then stopping{hint}\n".encode())
            raise stop(f"asked to stop by {signal.Signals(number).name}", signal.Signals(number))
        if number == signal.SIGINT and now - first_s[0] > 1.0:
            os.write(2, b"stopped by a second Ctrl-C without saving; what was saved before is intact\n")
            os._exit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, receive)
    yield


def _silence_agent() -> None:
    """The agent reports each failure over thirty lines; ours says it once."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _failed(failures: dict[int, Any], run_directory: Path) -> Ended:
    """The first failure. One killed by a signal wrote nothing, and what others wrote about it is only a consequence."""
    outcome = read_exit(run_directory)
    # timestamps are whole seconds; a rank that ended by SIGTERM was stopped by the agent because another had failed
    rank, first = min(failures.items(), key=lambda item: (item[1].exitcode == -signal.SIGTERM, item[1].timestamp))
    killed = {r: f for r, f in failures.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM}
    if killed and (outcome is None or outcome.kind == "peer_lost" or outcome.rank in killed):
        rank, first = min(killed.items(), key=lambda item: item[1].timestamp)
        problem = _killed(rank, first.pid, -first.exitcode, run_directory)
        told = Exit("crash", 1, problem.what, rank, pid=first.pid, problems=[asdict(problem)], restartable=True)
        write_exit(run_directory, told)
        return Ended(1, problem)
    if outcome is not None:
        return Ended(outcome.exit_code, _cause(outcome))
    what = f"rank {rank} (pid {first.pid}) ended with exit code {first.exitcode} and left no cause"
    fix = f"its output is above; run again with --debug, or `--resume {run_directory}`"
    return Ended(first.exitcode if first.exitcode > 0 else ShardwiseError.exit_code, Problem("RUN004", what, "", fix))


def _killed(rank: int, pid: int, number: int, run_directory: Path) -> Problem:
    name = signal.Signals(number).name
    what = f"rank {rank} (pid {pid}) was killed by {name}"
    fix = f"`shardwise train --resume {run_directory}` continues from the newest checkpoint"
    if number == signal.SIGKILL:
        fix = f"if the kernel ran out of memory (dmesg says so), use a smaller micro-batch; {fix}"
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


def _stopped(received: signal.Signals, run_directory: Path) -> Ended:
    outcome = read_exit(run_directory)
    if outcome is not None:
        return Ended(outcome.exit_code, _cause(outcome))
    what = f"stopped by {received.name} before the ranks could save"
    return Ended(128 + received, Problem("RUN005", what, f"{run_directory}", "start it again"))
