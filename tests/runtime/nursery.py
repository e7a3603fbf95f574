"""Processes that are made to die, cheaply: forked from one that has imported everything and has no thread yet.

    with nursery() as ask:
        ask("tests.runtime.checkpoint.commit_once:run", 1, "directory", 2)  # [Child(status=0, result=...)] in a few ms

Killing a rank of the pool costs a new pool; here a point costs a fork. Children of one request form a gloo group.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

DEADLINE_S = 20.0


@dataclass(frozen=True)
class Child:
    """``status``: exit code, or minus the signal. ``result``: what the function returned, or None if it never did."""

    status: int
    result: Any


Ask = Callable[..., list[Child]]
"""A function as ``module:name``, the number of processes, the function's arguments after (rank, world)."""


@contextmanager
def nursery() -> Iterator[Ask]:
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{root / 'src'}:{root}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-W", "ignore", "-m", "tests.runtime.nursery"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=root, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        out, into = process.stdout, process.stdin

        def ask(fn: str, world: int, *args: Any) -> list[Child]:
            into.write(json.dumps([fn, world, args]) + "\n")
            into.flush()
            return [Child(**child) for child in json.loads(out.readline())]

        yield ask
        into.close()


def serve() -> None:
    import torch.distributed  # noqa: F401  so that no child needs to

    answers = os.dup(1)
    os.dup2(2, 1)  # whatever is printed must not end up among the answers
    for line in sys.stdin:
        name, world, args = json.loads(line)
        module, fn = name.split(":")
        work = getattr(importlib.import_module(module), fn)
        with tempfile.TemporaryDirectory() as store:
            children = [fork(work, rank, world, args, store) for rank in range(world)]
            found = [asdict(gather(pid, pipe)) for pid, pipe in children]
        os.write(answers, json.dumps(found).encode() + b"\n")


def fork(work: Callable[..., Any], rank: int, world: int, args: list[Any], store: str) -> tuple[int, int]:
    """(pid, pipe to read the answer from)"""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        if world > 1:
            import torch.distributed as dist

            where = dist.FileStore(f"{store}/store", world)
            dist.init_process_group("gloo", store=where, rank=rank, world_size=world, timeout=timedelta(seconds=60))
        os.write(writing, json.dumps(work(rank, world, *args), default=plain).encode())
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
        os._exit(1)
    os._exit(0)


def plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def gather(pid: int, pipe: int) -> Child:
    """Wait for a child's answer and its end; one that does not come to an end is killed, and seen to be."""
    deadline, data = time.monotonic() + DEADLINE_S, b""
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(pipe, 1 << 16)
        if not part:
            break
        data += part
    else:
        os.kill(pid, signal.SIGALRM)
    os.close(pipe)
    _, status = os.waitpid(pid, 0)
    return Child(os.waitstatus_to_exitcode(status), json.loads(data) if data else None)


if __name__ == "__main__":
    serve()
