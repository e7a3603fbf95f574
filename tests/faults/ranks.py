"""Ranks that are made to fail, cheaply: forked from a process that has imported everything and has no thread yet, and
then the ``shardwise train`` of a rank, from its command line to its exit code.

    with ranks_to_kill() as ranks:
        ranks.start(words, Order(world=2, faults={1: "reduce:7:1"}), log)     # [pid, pid]
        ranks.finish()                                                        # [1, -9]
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from shardwise.launch.worker import STORE

ROOT = Path(__file__).parents[2]
DEADLINE_S = 150.0
IMPORTED = (
    "safetensors.torch",
    "tokenizers",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "shardwise.cli.train",
    "shardwise.cli.work",
    "shardwise.runtime.loop",
)
"""What takes seconds to load, once for all ranks."""


@dataclass(frozen=True)
class Order:
    """How many ranks; which ones get which ``SHARDWISE_FAULT``; and what is broken in all of them before they begin:
    a function of tests.faults.sabotage with its arguments after the rank and the run's directory."""

    world: int
    faults: dict[int, str] = field(default_factory=dict)
    sabotage: tuple[Any, ...] = ()


class Ranks:
    """Starts the ranks of one job at a time."""

    def __init__(self, into: IO[str], out: IO[str]) -> None:
        self._into, self._out = into, out

    def start(self, words: Sequence[str], order: Order, directory: Path, log: Path) -> list[int]:
        """Start ``shardwise <words>`` as ranks; ``directory`` is the run's. What they print goes to ``log``."""
        ask = {"words": list(words), "order": asdict(order), "directory": str(directory), "log": str(log)}
        self._into.write(json.dumps(ask) + "\n")
        self._into.flush()
        pids: list[int] = json.loads(self._out.readline())
        return pids

    def finish(self) -> list[int]:
        """Wait for all of them; exit codes, minus the signal for those that were killed."""
        codes: list[int] = json.loads(self._out.readline())
        return codes


@contextmanager
def ranks_to_kill() -> Iterator[Ranks]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults.ranks"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment()) as process:
        assert process.stdin is not None and process.stdout is not None
        yield Ranks(process.stdin, process.stdout)
        process.stdin.close()


def environment() -> dict[str, str]:
    """What launchers and ranks of these tests get: ours, without anybody's ranks, on one core and this machine only."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "SHARDWISE_FAULT")}
    return kept | {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
    }


def prepare(*more: str) -> None:
    """Import what ranks import, and ``more``. Samples are short: what these tests look at does not depend on them,
    and the runs of the real command line do all of it."""
    for name in (*IMPORTED, *more):
        importlib.import_module(name)
    from shardwise.runtime.report import sample

    sample.SAMPLE = dataclasses.replace(sample.SAMPLE, max_new_tokens=2)


def serve() -> None:
    """Fork what is asked for, a line of JSON at a time; answer with the pids, and with the codes at the end."""
    prepare()
    from shardwise.runtime.metrics import measure

    measure.Meter.MEMORY_STEP = 0
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever is printed must not end up among the answers
    for line in sys.stdin:
        ask = json.loads(line)
        with tempfile.TemporaryDirectory() as private:
            ask["store"] = f"{private}/store"
            pids = [fork(rank, ask) for rank in range(ask["order"]["world"])]
            os.write(answers, json.dumps(pids).encode() + b"\n")
            codes = gather(pids)
        os.write(answers, json.dumps(codes).encode() + b"\n")


def fork(rank: int, ask: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        log = os.open(ask["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for number in (1, 2):
            os.dup2(log, number)
        code = be_rank(rank, ask)
    except BaseException as error:
        os.write(2, f"rank {rank}: {error!r}\n".encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def be_rank(rank: int, ask: dict[str, Any]) -> int:
    """What a launcher starts: the exit code. Without ours, a rank prints what ends it."""
    order, name = ask["order"], str(rank)
    os.environ |= {
        "RANK": name,
        "LOCAL_RANK": name,
        "WORLD_SIZE": str(order["world"]),
        "LOCAL_WORLD_SIZE": str(order["world"]),
        STORE: ask["store"],
        "SHARDWISE_FAULT": order["faults"].get(name, ""),
    }
    if order["sabotage"]:
        deed, *args = order["sabotage"]
        getattr(importlib.import_module("tests.faults.sabotage"), deed)(rank, Path(ask["directory"]), *args)
    from shardwise.cli.app import main

    return main(ask["words"])


def gather(pids: Sequence[int]) -> list[int]:
    """The codes of our own children; who is not done in time is killed, and seen to be."""
    deadline = time.monotonic() + DEADLINE_S
    codes = []
    for pid in pids:
        handle = os.pidfd_open(pid)
        if not select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0]:
            os.kill(pid, signal.SIGALRM)
            os.kill(pid, signal.SIGCONT)
        os.close(handle)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return codes


if __name__ == "__main__":
    serve()
