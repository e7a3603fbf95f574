"""Watches a run: the phase of each rank, hangs, requests to stop, non-finite steps, and faults that tests plant."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from shardwise.errors import Problem, ShardwiseError, TrainingError, first_line
from shardwise.runtime.checkpoint.manifest import train_again
from shardwise.runtime.faults import flight
from shardwise.runtime.faults.heartbeat import LEFT, Page, RankStatus, culprit, hang, read_pages, stuck
from shardwise.runtime.faults.outcome import Exit, Kind, clear_exit, read_exit, write_exit
from shardwise.runtime.faults.signals import received
from shardwise.runtime.owner import Claim
from shardwise.runtime.world import Process, is_worker, take_device

ABANDONED_S = 10.0
"""A rank that makes no progress this long after the run failed elsewhere, or another rank of its node died, ends
itself: its launcher may wait for it, and under NCCL nothing else would end it."""
SLOWER = 10.0
"""How many times as long as the phases of a step all other phases may last."""
Item = TypeVar("Item")
SLOW_PHASES = frozenset({"start", "wait", "save", "evaluate", "compare", "end"})
"""Phases that may take that much longer. The phases of a step are: data, count, forward, backward, reduce, clip,
optimizer, logging; of a pipeline, forward and backward of a stage and a micro-batch, and waits for
another rank."""


@dataclass(frozen=True)
class InjectedFault:
    """A fault that a test plants at one phase of one step on one rank: ``phase:step:rank[:signal]``. The signal is a
    name or number, or ``raise`` for an exception, ``oom`` for that of memory, or ``hang`` to sleep for ever."""

    phase: str
    step: int
    rank: int
    action: str = "SIGKILL"

    @classmethod
    def parse(cls, text: str) -> InjectedFault | None:
        if not text:
            return None
        phase, step, rank, *action = text.split(":")
        return cls(phase, int(step), int(rank), action[0] if action else "SIGKILL")

    def fire(self, directory: Path) -> None:
        """Fail, but only once per run directory: a marker file records it."""
        marker = directory / f"fault-{self.phase}-{self.step}-{self.rank}"
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return
        if self.action == "raise":
            raise RuntimeError(f"fault ordered at {self.phase} of step {self.step} on rank {self.rank}")
        if self.action == "oom":
            raise torch.OutOfMemoryError(f"out of memory ordered at {self.phase} of step {self.step}")
        if self.action == "hang":
            time.sleep(3600)
        number = int(self.action) if self.action.isdigit() else int(signal.Signals[self.action])
        os.kill(os.getpid(), number)


class Guard:
    """One rank's watch. ``enter`` is called at every phase; a thread notices a rank that stays in one for too long, and
    ends the process if the main thread cannot, because it waits for a device that hangs in NCCL."""

    def __init__(self, run_directory: Path, me: Process, timeout_s: float, claim: Claim | None = None) -> None:
        self.directory = run_directory
        self.claim = claim
        self.me = me
        self.page = Page(run_directory, me.rank)
        self.timeout_s = timeout_s
        self.fault = InjectedFault.parse(me.fault)
        self.step = 0
        self.first_step = 0
        self._stop = threading.Event()
        self._dumped_count = -1
        self._told: tuple[BaseException, BaseException, float] | None = None
        self._moved = 0, 0, time.monotonic()
        self._neighbours: dict[int, int] = {}
        self._thread = threading.Thread(target=self._watch, name="shardwise-watch", daemon=True)
        self._thread.start()

    def fetch(self, step: int, batches: Iterator[Item]) -> Item:
        """Optimizer step ``step`` (from 1) begins with its data, the next of ``batches``."""
        self.first_step = self.first_step or step
        self.step = step
        self.enter("data")
        item = next(batches)
        self.enter("count")
        return item

    def enter(self, phase: str) -> None:
        """This rank enters ``phase``. Raises OutputError OUT005 before a new step, validation or save if the directory
        was lost."""
        if self.claim and self.page.status.rank == 0 and (phase in SLOW_PHASES or phase == "data"):
            self.claim.check(0.0 if phase == "save" else 1.0)
        self.page.enter(phase, self.step)
        here = phase.partition(" ")[0], self.step, self.page.status.rank
        if (fault := self.fault) and (fault.phase, fault.step, fault.rank) == here:
            fault.fire(self.directory)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.page.enter(LEFT, self.step)
        self.page.close()

    def doing(self) -> str:
        """Return, for errors, what the rank does, and when."""
        return f"training (phase {self.page.status.phase} of step {self.step})"

    def patience_s(self) -> float:
        """Return how long the current phase may last: longer while the run starts or writes."""
        warming = self.step <= self.first_step + 1
        return self.timeout_s * (SLOWER if warming or self.page.status.phase in SLOW_PHASES else 1.0)

    @property
    def nccl_timeout_s(self) -> float:
        """NCCL's own timeout, in case this watch cannot run."""
        return SLOWER * self.timeout_s + 60.0

    def tell(self, error: BaseException) -> BaseException:
        """Return what ``error`` means. It is written to ``exit.json``, once, unless the directory was lost to another
        start. A lost or silent rank comes out as a TrainingError: HANG001 naming the rank that others wait for, or
        LOST001."""
        if self._told is None or self._told[0] is not error:
            told = diagnose(error, self.directory, self.me, self.timeout_s)
            if self.claim is None or self.claim.held():
                with suppress(OSError):  # a full disk must not hide the cause
                    write_exit(self.directory, outcome(told, self.page.status))
            self._told = error, told, time.monotonic()
        return self._told[1]

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self.timeout_s / 40)):  # the stack is written before any rank times out
            status = self.page.status
            waited_s = time.monotonic() - status.since_s
            asked = flight.LastCollective(status.collective, status.sequence)
            if waited_s >= 2.0:
                with suppress(Exception):  # a page that cannot be read must not stop the watch
                    take_device()
                    asked = flight.newest_collective()
            if self.page.status.count == status.count:
                self.page.beat(asked.name, asked.number)
            if waited_s > 0.9 * self.patience_s() and self._dumped_count != status.count:
                self._dumped_count = status.count
                self.dump_stacks()
            self._end_if_lost(self._still_s(status.count, asked.number), asked.pending)

    def _still_s(self, count: int, number: int) -> float:
        """Return for how long this rank has entered no phase and called no collective."""
        if self._moved[:2] != (count, number):
            self._moved = count, number, time.monotonic()
        return time.monotonic() - self._moved[2]

    def _end_if_lost(self, still_s: float, pending: bool) -> None:
        """End the process if the run has failed elsewhere, or hangs in NCCL, and the main thread does not see it."""
        gone = self.gone()
        if self._told is not None and time.monotonic() - self._told[2] > ABANDONED_S:
            self._end(self._told[1])  # it has reported its failure, but does not come to an end
        if still_s > ABANDONED_S and self.run_failed():
            self.dump_stacks()
            os._exit(TrainingError.exit_code)
        if still_s > ABANDONED_S and gone:
            what = f"rank {gone.rank} (pid {gone.pid}) has died"
            self._end(TrainingError(lost(what, self.page.status, self.directory)))
        if pending and still_s > self.patience_s():
            statuses = read_pages(self.directory, range(self.me.world_size))
            late = culprit(statuses)
            found = hang(statuses, still_s, self.directory) or stuck(statuses, still_s, self.directory)
            end_process(late, self.me)
            self._end(TrainingError(found))

    def gone(self) -> RankStatus | None:
        """A rank of this node that was alive, and has died without leaving the run."""
        others = [page for page in read_pages(self.directory, self.me.neighbours) if page.rank != self.me.rank]
        alive = {page.rank: page.pid for page in others if page.runs}
        dead = [page for page in others if page.rank not in alive and page.phase != LEFT]
        self._neighbours |= alive
        return next((page for page in dead if self._neighbours.get(page.rank) == page.pid), None)

    def _end(self, error: BaseException) -> None:
        """End the process now. The problem goes to ``exit.json``, and is printed unless our launcher prints it."""
        told = self.tell(error)
        self.dump_stacks()
        standing = read_exit(self.directory)
        if not self.me.told_for and (standing is None or standing.rank == self.me.rank):
            print(told, file=sys.stderr, flush=True)
        os._exit(told.exit_code if isinstance(told, ShardwiseError) else ShardwiseError.exit_code)

    def run_failed(self) -> bool:
        """Return whether another rank has written that the run failed."""
        told = read_exit(self.directory)
        return told is not None and told.kind not in ("done", "preempted") and told.rank != self.page.status.rank

    def dump_stacks(self) -> None:
        """Write the stack of every thread of this rank under ``hang-step-N/``, if the disk takes it: a watch without
        stacks still ends a rank that hangs."""
        status = self.page.status
        path = self.directory / f"hang-step-{status.step}" / f"rank-{status.rank:05d}.txt"
        place = f"rank {status.rank} on {status.host}, pid {status.pid}: phase {status.phase} of step {status.step},"
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                print(
                    f"{place}\nnewest collective {status.collective or '-'} #{status.sequence}", file=file, flush=True
                )
                faulthandler.dump_traceback(file, all_threads=True)


class StopRequest:
    """A request that this process stop, true once it was made: by SIGTERM, SIGUSR1 (Slurm's warning), SIGHUP or Ctrl-C.
    A second Ctrl-C, at least a second later (a terminal and a launcher may both pass on the first), stops at once.
    ``everywhere``: the ranks have agreed that some of them were asked."""

    def __init__(self) -> None:
        self.name = ""
        self.everywhere = False
        self._first_s = 0.0

    def __bool__(self) -> bool:
        return bool(self.name)

    def receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self.name and now - self._first_s > 1.0:
            raise KeyboardInterrupt
        if not self.name:
            self.name, self._first_s = signal.Signals(number).name, now


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn the signals that ask for a stop into a flag that the loop reads. A rank that was asked is leaving: Slurm may
    warn twice."""
    request = StopRequest()
    with received(request.receive, lambda: bool(request) and is_worker()):
        yield request


@contextmanager
def watching(run_directory: Path, me: Process, timeout_s: float, claim: Claim | None = None) -> Iterator[Guard]:
    """Watch one rank's run and write its outcome to ``exit.json``; errors are translated by ``Guard.tell``."""
    if me.rank == 0 and claim is None:  # whoever claimed it has removed an earlier outcome before any rank was started
        clear_exit(run_directory)
    watch = Guard(run_directory, me, timeout_s, claim)
    try:
        yield watch
    except BaseException as error:
        told = watch.tell(error)
        if told is error:
            raise
        raise told from error
    else:
        if me.rank == 0:
            write_exit(run_directory, Exit("done", 0, "done", step=watch.step, host=me.host, pid=os.getpid()))
    finally:
        watch.close()


GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "Connection refused")
SILENT = ("Timed out waiting", "timed out", "Timeout")


def diagnose(error: BaseException, run_directory: Path, me: Process, timeout_s: float) -> BaseException:
    """``error``, or what it means when a collective failed because of another rank."""
    text = str(error)
    if isinstance(error, ShardwiseError) or not isinstance(error, RuntimeError):
        return error
    statuses = read_pages(run_directory, range(me.world_size))
    if any(mark in text for mark in SILENT):
        problem = hang(statuses, timeout_s, run_directory)
        if problem:
            end_process(culprit(statuses), me)
            return TrainingError(problem)
    if any(mark in text for mark in (*GONE, *SILENT)):
        own = next((status for status in statuses if status.rank == me.rank), None)
        return TrainingError(lost(f"another rank went away: {first_line(error, 200)}", own, run_directory))
    return error


def lost(what: str, own: RankStatus | None, run: Path) -> Problem:
    """The problem LOST001 from the point of view of the rank with the page ``own``."""
    where = f"rank {own.rank} (host {own.host}) was in {own.doing} of step {own.step}" if own else ""
    fix = f"the cause is another rank's, see its output; then: {train_again(run)}"
    return Problem("LOST001", what, where, fix)


def end_process(late: RankStatus | None, me: Process) -> None:
    """Kill the rank that the others wait for, if it is on this host and a child of our launcher: a stopped process does
    not react to a request, and the launcher waits until it is gone."""
    if late is None or late.host != me.host or late.pid == os.getpid():
        return
    with suppress(OSError, IndexError, ValueError):
        parent = int(Path(f"/proc/{late.pid}/stat").read_text().rpartition(")")[2].split()[1])
        if parent == os.getppid():
            os.kill(late.pid, signal.SIGKILL)


def outcome(error: BaseException, status: RankStatus) -> Exit:
    """Return what ``exit.json`` says about ``error``."""
    known = asdict(status)
    place: dict[str, Any] = {key: known[key] for key in ("rank", "host", "pid", "step", "phase")}
    if isinstance(error, ShardwiseError):
        kinds: dict[str, Kind] = {"HANG001": "hang", "LOST001": "peer_lost", "MEM001": "memory", "STOP001": "preempted"}
        kind = kinds.get(error.problems[0].code, "error")
        problems = [asdict(problem) for problem in error.problems]
        again = kind in ("hang", "peer_lost", "preempted") or error.problems[0].code == "SDC001"
        return Exit(kind, error.exit_code, str(error), problems=problems, restartable=again, **place)
    if isinstance(error, KeyboardInterrupt):
        return Exit("error", 130, "stopped by a second Ctrl-C without saving", restartable=True, **place)
    last = traceback.format_exception_only(error)[-1].strip()
    return Exit("crash", ShardwiseError.exit_code, last, **place)


def poisoned(what: str, step: int, ids: Sequence[int], last: Path | None) -> Problem:
    """NUM001 for a run whose numbers are not finite; nothing of the poisoned steps was applied or saved. ``ids`` are
    this rank's samples of the step, ``last`` is the newest checkpoint."""
    shown = ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")
    fix = "lower optim.learning_rate, lengthen optim.warmup_steps, or use precision.compute=bf16 or fp32"
    fix += f"; {last.name} holds the last good weights" if last else "; there is no checkpoint to go on from"
    return Problem("NUM001", what, f"step {step}, samples {shown}", fix)
