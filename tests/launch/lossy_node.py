"""Nodes that are lost, cheaply: each is ``shardwise train`` with PET_ variables, forked from a process that has
imported everything, and so are its ranks. What it waits for is no longer than a test can.

    with nodes_to_lose() as nodes:
        one = nodes.start(["train", "recipe.yaml"], {"PET_NODE_RANK": "1", ...}, log)     # its pid, and process group
        nodes.finish(one)                                                                 # 0, or minus a signal
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from shardwise.launch import elastic, local
from shardwise.launch.roster import Patience
from tests.faults.ranks import ROOT, environment, prepare
from tests.launch.wire import NETNS, enter

QUICK = Patience(beat_s=0.5, look_s=0.1, lost_s=20.0, settle_s=1.0, start_s=100.0, wait_s=100.0)


class Nodes:
    """Starts nodes, any number at a time."""

    def __init__(self, into: IO[str], out: IO[str]) -> None:
        self._into, self._out = into, out

    def start(self, words: Sequence[str], variables: Mapping[str, str], log: Path) -> int:
        """Start one; its pid. What it and its ranks print goes to ``log``."""
        return self._ask({"words": list(words), "variables": dict(variables), "log": str(log)})

    def finish(self, pid: int) -> int:
        """Wait for it; its exit code, or minus the signal that killed it."""
        return self._ask({"wait": pid})

    def _ask(self, question: Mapping[str, Any]) -> int:
        self._into.write(json.dumps(question) + "\n")
        self._into.flush()
        return int(self._out.readline())


@contextmanager
def nodes_to_lose() -> Iterator[Nodes]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-W", "ignore", "-m", "tests.launch.lossy_node"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment()) as process:
        assert process.stdin is not None and process.stdout is not None
        yield Nodes(process.stdin, process.stdout)
        process.stdin.close()


def serve() -> None:
    prepare("shardwise.cli.on_loss")
    answers = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        ask = json.loads(line)
        if "wait" in ask:
            said = os.waitstatus_to_exitcode(os.waitpid(ask["wait"], 0)[1])
        else:
            said = os.fork() or be_node(ask)
        os.write(answers, f"{said}\n".encode())


def be_node(ask: Mapping[str, Any]) -> int:
    """What a scheduler starts, in a process group of its own; it does not return."""
    os.setsid()
    log = os.open(ask["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(log, number)
    os.environ |= ask["variables"]
    if namespace := os.environ.get(NETNS):
        enter(namespace)
    stay = elastic.stay
    local.subprocess = ForkedRanks  # type: ignore[attr-defined]
    elastic.stay = lambda *given: stay(*given, patience=QUICK)  # type: ignore[assignment]
    return leave(ask["words"])


def leave(words: Sequence[str]) -> int:
    code = 99
    try:
        from shardwise.cli.app import main

        code = main(words)
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class ForkedRanks:
    """Stands for subprocess in the launcher: ``python -u -m shardwise <words>`` is forked, not begun anew."""

    class Popen:
        def __class_getitem__(cls, kind: type) -> type:
            return cls

        def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
            self.returncode: int | None = None
            self.pid = os.fork()
            if self.pid == 0:
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
                    signal.signal(number, signal.SIG_DFL)
                os.environ.clear()
                os.environ |= env
                leave(command[4:])

        def poll(self) -> int | None:
            if self.returncode is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
                self.returncode = os.waitstatus_to_exitcode(found[1])
            return self.returncode

        def send_signal(self, number: int) -> None:
            if self.poll() is None:
                os.kill(self.pid, number)

        def wait(self) -> int:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return self.returncode


if __name__ == "__main__":
    serve()
