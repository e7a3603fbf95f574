"""Boards for tests: runs in many states, a board in a thread or in a process of its own, and who asks it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

from shardwise.cli.board_pages import KEPT_S, BoardPages
from shardwise.cli.board_server import BoardServer
from shardwise.runtime.faults.outcome import Exit, write_exit
from tests.cli.test_compare import write_run


@dataclass
class Asked:
    """Who asks a board: its port, the path of its token, and the files it shows."""

    port: int
    token: str
    runs: Path
    process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.token}/"

    def page(self, rest: str = "") -> str:
        """The page at this place after the token. Raises AssertionError where there is none."""
        status, text = self.ask(rest)
        assert status == 200, f"{status} {text}"
        return text

    def whole(self) -> str:
        """The overview once all that it shows has been read."""
        while "to be read" in (found := self.page()):
            time.sleep(KEPT_S)
        return found

    def ask(self, rest: str = "", method: str = "GET") -> tuple[int, str]:
        """The status of this place after the token, and its text."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request(method, f"/{self.token}/{rest}")
        found = connection.getresponse()
        text = found.read().decode()
        connection.close()
        return found.status, text

    def raw(self, request: bytes, timeout_s: float = 10.0) -> bytes:
        """All that comes back for these bytes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout_s) as one:
            found = b""
            try:
                one.sendall(request)
                while part := one.recv(65536):
                    found += part
            except ConnectionError:
                pass
            return found


@contextmanager
def board(runs: Path) -> Iterator[Asked]:
    """A board in a thread of this process."""
    with BoardServer(BoardPages(runs).answer, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield Asked(server.server_port, server.token, runs)
        finally:
            server.shutdown()
            thread.join()


PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["shardwise", *sys.argv[1:]]
from shardwise.cli.app import main
sys.exit(main())
"""


@contextmanager
def own_process(runs: Path, *words: str) -> Iterator[Asked]:
    """``shardwise board`` as a user starts it."""
    command = [sys.executable, "-c", PROGRAM, "board", str(runs), *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            address = json.loads(line)["address"] if line.startswith("{") else line
            place, token = address.strip().rstrip("/").rsplit("/", 1)
            yield Asked(int(place.rpartition(":")[2]), token, runs, process)
        finally:
            process.terminate()


def resident_mib(pid: int) -> float:
    """MiB of a process that are in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def processor_s(pid: int) -> float:
    """Seconds of the processor that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def some_runs(place: Path) -> Path:
    """Runs that were finished, stopped, failed and interrupted; the last one is the newest."""
    ends = {
        "finished": Exit("done", 0, ""),
        "stopped": Exit("preempted", 75, "asked to stop"),
        "failed": Exit("hang", 1, "rank 1 is silent"),
        "interrupted": None,
    }
    for name, end in ends.items():
        run = write_run(place / name, 20, 0.1, name == "finished", train={"max_steps": 40})
        if end:
            write_exit(run, end)
    return place


def many_runs(place: Path, count: int, lines: int) -> Path:
    """As many finished runs as many steps long, made quickly."""
    first = write_run(place / "run-0", 2, 1e-4, train={"max_steps": lines})
    rows = [
        {"step": n, "tokens": 64 * n, "loss": 5 - 1e-4 * n, "grad_norm": 1.0, "learning_rate": 1e-3, "mfu": None}
        | {"tokens_per_s": 100.0 + n % 7, "seconds": 0.5, "memory_bytes": 2**30, "skipped": False}
        for n in range(1, lines + 1)
    ]
    (first / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_exit(first, Exit("done", 0, ""))
    for number in range(1, count):
        other = place / f"run-{number}"
        other.mkdir()
        for file in first.iterdir():
            (other / file.name).write_bytes(file.read_bytes())
    return place
