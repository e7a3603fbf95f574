"""A pool of gloo ranks on this machine that live through many runs, so that a proof on four ranks costs milliseconds.

    with RankPool(4) as pool:
        sums = pool.run(add, 3.0, world=2)      # add(rank, world, 3.0) on two ranks; the list of what they returned

Each run has a default process group of its own, of exactly ``world`` ranks. A rank that raises, dies or hangs makes
``run`` raise :class:`RankFailure` with that rank's traceback, and the ranks are replaced before the next run. Pickles
travel only through pipes between this process and the ranks it started; ranks find one another through files in a
directory that only this user can open, and talk over the loopback interface.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver, get_context
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, Self

from shardwise.distributed.torch_private import forget_sharding
from shardwise.spec.safe_path import safe_path

PRELOAD = (
    "torch",
    "torch._dynamo",  # what DTensor loads at its first operation
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "shardwise.prove.pool",
    "shardwise.prove.parity",
)
"""What takes seconds to load, once for all ranks."""
PATIENCE_S = 300.0
"""How long a run may take before it is said to hang: several times what compiling takes on a machine that is busy."""

AFTER_FIRST_FAILURE_S = 2.0
"""How long the other ranks may take to fail too, once one has: they often wait in a collective for it."""

BYSTANDER = ("distributed_c10d.py", "gloo")
"""A rank whose report says this failed in a collective, most likely because another rank did not come."""


class RankFailure(RuntimeError):
    """A rank raised, died or hung. ``rank`` is the first to fail; ``reports`` has what each failed rank said."""

    def __init__(self, rank: int, reports: dict[int, str]) -> None:
        first = {rank: reports[rank]}
        super().__init__("\n".join(f"rank {r}: {text.rstrip()}" for r, text in (first | reports).items()))
        self.rank = rank
        self.reports = reports


@dataclass(frozen=True)
class Task:
    """A task for a rank: a pickled (function, arguments), and the group to do it in."""

    work: bytes
    world: int
    name: str
    timeout_s: float


@dataclass(frozen=True)
class Seat:
    """One rank: its process, our end of its pipe, and the file into which its stacks go when it hangs or crashes."""

    process: Any
    pipe: Any
    stacks: Path


class Ranks(Protocol):
    """Ranks that do what :meth:`RankPool.run` says."""

    def run(self, fn: Callable[..., Any], *args: Any, world: int = 2, timeout_s: float = PATIENCE_S) -> list[Any]: ...


class RankPool:
    """``ranks`` processes, started at the first run. Not for use by several threads at once."""

    def __init__(self, ranks: int = 4) -> None:
        self.ranks = ranks
        self._seats: list[Seat] = []
        self._runs = 0
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any, world: int = 2, timeout_s: float = PATIENCE_S) -> list[Any]:
        """``fn(rank, world, *args)`` on the first ``world`` ranks; the list of results by rank.

        ``fn`` must be importable by name (a module's function) and its arguments and result picklable. After
        ``timeout_s`` seconds the ranks that have not answered are stopped, and the failure shows where they stood.
        """
        if not 1 <= world <= self.ranks:
            raise ValueError(f"world {world} is not between 1 and the {self.ranks} ranks of this pool")
        work = pickle.dumps((fn, args))
        self._start()
        self._runs += 1
        job = pickle.dumps(Task(work, world, f"run-{self._runs}", timeout_s))
        try:
            for seat in self._seats[:world]:
                seat.pipe.send_bytes(job)
        except (BrokenPipeError, ConnectionResetError):
            self.close()  # a rank died between two runs: nothing of this run was done, so it can start with new ranks
            return self.run(fn, *args, world=world, timeout_s=timeout_s)
        try:
            return self._collect(world, timeout_s)
        except BaseException:
            self.close()  # a failed or interrupted run leaves ranks inside collectives: they cannot be trusted
            raise

    def pids(self) -> list[int]:
        """Process ids of the living ranks, by rank."""
        return [seat.process.pid for seat in self._seats]

    def close(self) -> None:
        """Stop every rank at once. The next run starts new ones."""
        for seat in self._seats:
            seat.process.kill()
        for seat in self._seats:
            seat.process.join()
            seat.pipe.close()
        if self._directory is not None:
            self._directory.cleanup()
        self._seats, self._directory = [], None

    def _start(self) -> None:
        # A rank that died has closed its pipe before anybody notices its end; a living one has nothing to say yet.
        if self._seats and all(seat.process.is_alive() and not seat.pipe.poll() for seat in self._seats):
            return
        self.close()
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        spawning = get_context("forkserver")
        spawning.set_forkserver_preload(list(PRELOAD))
        with safe_path(), _interrupts_ignored():
            forkserver.ensure_running()
        for rank in range(self.ranks):
            ours, theirs = spawning.Pipe()
            stacks = Path(self._directory.name) / f"stacks-{rank}"
            stacks.write_text("")
            seat = (rank, theirs, str(stacks))
            process = spawning.Process(target=serve, args=seat, name=f"rank-{rank}", daemon=True)
            with safe_path():
                process.start()
            theirs.close()
            self._seats.append(Seat(process, ours, stacks))

    def _collect(self, world: int, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        reports: dict[int, str] = {}
        waiting = {self._seats[rank].pipe: rank for rank in range(world)}
        deadline = time.monotonic() + timeout_s + 1.0  # ranks write their stacks at timeout_s
        while waiting:
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                failure, value = self._answer(rank)
                if failure is None:
                    results[rank] = value
                    continue
                if not reports:
                    deadline = min(deadline, time.monotonic() + AFTER_FIRST_FAILURE_S)
                reports[rank] = failure
        if waiting:
            reports |= {rank: self._silent(rank, timeout_s) for rank in sorted(waiting.values())}
        if reports:
            raise RankFailure(min(reports, key=lambda rank: any(mark in reports[rank] for mark in BYSTANDER)), reports)
        return [results[rank] for rank in range(world)]

    def _answer(self, rank: int) -> tuple[str | None, Any]:
        seat = self._seats[rank]
        try:
            answer: tuple[str | None, Any] = pickle.loads(seat.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            seat.process.join(timeout=5.0)
            code = seat.process.exitcode
            how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
            stacks = seat.stacks.read_text()
            return f"died without an answer ({how})" + (f"; it stood in\n{stacks}" if stacks else ""), None
        return answer

    def _silent(self, rank: int, timeout_s: float) -> str:
        if stacks := self._seats[rank].stacks.read_text():
            return f"no answer after {timeout_s:g} s; it stood in\n{stacks}"
        return "still waiting when others had failed: gloo"


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Have what is started within the block never see a Ctrl-C: this process does, and stops its ranks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def serve(rank: int, pipe: Any, stacks: str) -> None:
    """The life of a rank: take a job, do it inside a fresh default group, answer. Ends when the pipe does."""
    import torch

    if not Path(stacks).exists():  # who asked for this rank was interrupted meanwhile
        return
    torch.set_num_threads(1)
    # tensors that are cut twice are gathered in two steps, of which each rank would warn
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    os.putenv("GLOO_SOCKET_IFNAME", "lo")
    os.putenv("CUDA_VISIBLE_DEVICES", "")  # ranks are CPU processes, whatever the machine has
    jobs: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=listen, args=(pipe, jobs), daemon=True).start()
    with Path(stacks).open("w") as report:
        gc.collect()
        gc.freeze()  # what is loaded stays: the collector need not look at it after each job
        faulthandler.enable(report)  # an abort or a segmentation fault leaves its stacks there too
        while True:
            job = pickle.loads(jobs.get())
            faulthandler.dump_traceback_later(job.timeout_s, file=report)
            try:
                reply = pickle.dumps((None, perform(rank, job, Path(stacks).parent)))
            except BaseException:  # whatever the work raised, a SystemExit too, is the answer to the process that asked
                reply = pickle.dumps((traceback.format_exc(), None))
            faulthandler.cancel_dump_traceback_later()
            pipe.send_bytes(reply)


def listen(pipe: Any, jobs: SimpleQueue[bytes]) -> None:
    """Pass jobs on. A thread of its own, so that a rank stuck in a collective still ends when its parent does."""
    while True:
        try:
            jobs.put(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


def perform(rank: int, job: Task, directory: Path) -> Any:
    """Do one job inside a default gloo group of ``job.world`` ranks, and take the group down."""
    import torch.distributed as dist

    timeout = timedelta(seconds=2 * job.timeout_s + 10)  # past the job's own: a hang is shown by every rank's stacks
    fresh = dist.FileStore(str(directory / job.name), job.world)  # type: ignore[attr-defined]  # imported, not exported
    dist.init_process_group("gloo", store=fresh, rank=rank, world_size=job.world, timeout=timeout)
    try:
        dist.barrier()  # or a rank with little to do may leave while another still connects to it
        fn, args = pickle.loads(job.work)
        return fn(rank, job.world, *args)
    finally:
        forget_sharding()
        dist.destroy_process_group()
        gc.collect()  # models that refer to themselves hold groups, and each group has threads that wake all the time
        sys.stdout.flush()
