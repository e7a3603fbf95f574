"""The ranks of ``shardwise train`` for tests of what a run does: forked from a process that has imported everything,
which saves most of the time that starting them takes. How they are really started is for tests/launch,
tests/faults/test_stops.py and the tests here that are marked ``launched``."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardwise.launch import local
from shardwise.launch.worker import LAUNCHER, STORE
from shardwise.runtime.faults.outcome import read_exit
from tests.cli.counts import COUNTS, count
from tests.faults.ranks import DEADLINE_S, ROOT, environment, prepare


class ReadyRanks:
    """Takes the place of ``shardwise.launch.local``'s launch."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server

    def launch(
        self, arguments: Sequence[str], nproc: int, run_directory: Path, port: int | None = None, saves: bool = True
    ) -> local.Ended:
        """``port``: ranks are told what torchrun would tell them, and meet there. None of these is asked to stop, so
        whether it ``saves`` is all the same."""
        (run_directory / "exit.json").unlink(missing_ok=True)
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        ask = {"words": list(arguments), "world": nproc, "environment": kept, "directory": os.getcwd()}
        ask |= {"port": port}
        sys.stdout.flush()
        sys.stderr.flush()
        answer, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # of this launch alone
        with answer:
            with theirs:
                socket.send_fds(self._server, [json.dumps(ask).encode()], [1, 2, theirs.fileno()])
            text = answer.recv(2**16)
        assert text, "the process that ranks are forked from has ended"
        ended: list[tuple[int, int, float]] = json.loads(text)
        failures = {rank: local.Failure(code, pid, when) for rank, (code, pid, when) in enumerate(ended) if code}
        return local._failed(failures, read_exit(run_directory), run_directory, None) if failures else local.Ended(0)


@contextmanager
def ready_ranks() -> Iterator[ReadyRanks]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-W", "ignore", "-m", "tests.cli.ready_ranks", str(theirs.fileno())]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), pass_fds=[theirs.fileno()]), ours:
        theirs.close()
        yield ReadyRanks(ours)


def serve(asks: socket.socket) -> None:
    """Fork what is asked for; answer with exit code, pid and time of end of each rank."""
    prepare("transformers.models.auto.modeling_auto", "transformers.models.gpt_neox.modeling_gpt_neox")
    while True:
        text, descriptors, _, _ = socket.recv_fds(asks, 2**20, 3)
        if not text:
            return
        ask, outputs = json.loads(text), descriptors[:2]
        with tempfile.TemporaryDirectory() as private:
            pids = [fork(rank, ask, f"{private}/store", outputs) for rank in range(ask["world"])]
            for descriptor in outputs:
                os.close(descriptor)
            ended = gather(pids)
        with socket.socket(fileno=descriptors[2]) as answer, suppress(BrokenPipeError):
            answer.send(json.dumps(ended).encode())


def fork(rank: int, ask: dict[str, Any], store: str, outputs: Sequence[int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        for number, descriptor in enumerate(outputs, start=1):
            os.dup2(descriptor, number)
        os.chdir(ask["directory"])
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ask["world"], "LOCAL_WORLD_SIZE": ask["world"]}
        os.environ.clear()
        os.environ |= ask["environment"] | {name: str(value) for name, value in places.items()}
        if ask["port"] is None:
            os.environ |= {STORE: store, LAUNCHER: str(os.getppid())}
        else:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ask["port"])}
        if COUNTS in os.environ:
            count()
        from shardwise.cli.app import main

        code = main(ask["words"])
    except BaseException as error:
        os.write(2, f"rank {rank}: {error!r}\n".encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def gather(pids: Sequence[int]) -> list[tuple[int, int, float]]:
    """(exit code, pid, when) of each; when one fails the others are asked to stop, and killed at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    handles = {os.pidfd_open(pid): pid for pid in pids}
    ended: dict[int, tuple[int, int, float]] = {}
    while handles:
        ready = select.select(list(handles), [], [], max(0.0, deadline - time.monotonic()))[0]
        for handle in ready:
            pid = handles.pop(handle)
            os.close(handle)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            ended[pid] = (code, pid, time.monotonic())
        failed = any(code for code, _, _ in ended.values())
        for pid in handles.values() if failed or not ready else ():
            os.kill(pid, signal.SIGTERM if ready else signal.SIGKILL)
    return [ended[pid] for pid in pids]


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
