"""A page of memory per rank, in a file of the run directory, that says where the rank is. It is written at every phase
(some microseconds) and can be read by another process even when the rank is stopped or holds the interpreter's lock.
Imports no torch: the launcher reads it too."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.errors import Problem
from shardwise.runtime.checkpoint.manifest import train_again
from shardwise.spec.files import NOTE_BYTES, read_regular

LAYOUT = struct.Struct("<8sqqqqddq16s48s64s")
MAGIC = b"SHWPAGE1"
DIRECTORY = "ranks"
LEFT = "left"
"""The phase of a rank that has ended by itself."""
WAITS = "waits"
"""The phase of a rank that waits for a message of a pipeline; behind it stand the sender, stage and micro-batch."""


@dataclass(frozen=True)
class RankStatus:
    """The point that a rank had reached when it last wrote. ``count`` is the number of phases entered so far and
    ``sequence`` the number of collectives asked for: both compare progress across ranks. Times are CLOCK_MONOTONIC
    seconds of the rank's host; ``beat_s`` moves as long as its interpreter lives."""

    rank: int
    pid: int
    step: int
    count: int
    since_s: float
    beat_s: float
    sequence: int
    phase: str
    collective: str
    host: str

    @property
    def doing(self) -> str:
        """The phase in words: ``forward 2.5`` is of stage 2 and micro-batch 5, and ``waits 3 2.5`` for rank 3, which is
        to send what they need."""
        word, *more = self.phase.split()
        if not more:
            return f"phase {word}"
        stage, _, micro = more[-1].partition(".")
        place = f"stage {stage}, micro-batch {micro}"
        return f"waiting for rank {more[0]} ({place})" if word == WAITS else f"phase {word} ({place})"

    @property
    def waits_for(self) -> int | None:
        """The rank whose message it waits for in a pipeline."""
        word, *more = self.phase.split()
        return int(more[0]) if word == WAITS and more else None

    @property
    def stopped(self) -> bool:
        """Return whether the process is stopped (SIGSTOP, a debugger); only known on the same host.

        Not one that waits in the kernel (state D): every process does for an instant, at a page fault or a read.
        """
        return self._state() in ("T", "t")

    @property
    def runs(self) -> bool:
        """Return whether the process is there, stopped or not; only known on the same host."""
        return self._state() not in ("", "Z", "X")

    @property
    def died(self) -> bool:
        """Return whether the process has died without leaving the run; only known on the same host."""
        return self.host == socket.gethostname() and self.phase != LEFT and not self.runs

    def _state(self) -> str:
        """The kernel's letter for the process's state; empty if there is no such process on this host."""
        if self.host != socket.gethostname():
            return ""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""

    @property
    def waiting(self) -> str:
        """The collective it last entered, for people."""
        return self.collective or self.doing


class Page:
    """This rank's page. One writer (the rank), any number of readers."""

    def __init__(self, run_directory: Path, rank: int) -> None:
        path = run_directory / DIRECTORY / f"{rank:05d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(LAYOUT.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), LAYOUT.size)
        self._host = socket.gethostname().encode()[:64]
        now = time.monotonic()
        self.status = RankStatus(rank, os.getpid(), 0, 0, now, now, 0, "start", "", self._host.decode())
        self._write()

    def enter(self, phase: str, step: int) -> None:
        """Record that a new phase begins."""
        now = time.monotonic()
        self.status = replace(self.status, step=step, count=self.status.count + 1, since_s=now, beat_s=now, phase=phase)
        self._write()

    def beat(self, collective: str, sequence: int) -> None:
        """Record that the interpreter is alive, and its newest collective: ``collective``, the ``sequence``-th."""
        self.status = replace(self.status, beat_s=time.monotonic(), sequence=sequence, collective=collective)
        self._write()

    def close(self) -> None:
        self._memory.close()

    def _write(self) -> None:
        s = self.status
        self._memory[:] = LAYOUT.pack(
            MAGIC, s.rank, s.pid, s.step, s.count, s.since_s, s.beat_s, s.sequence,
            s.phase.encode()[:16], s.collective.encode()[:48], self._host,
        )  # fmt: skip


def read_pages(run_directory: Path, ranks: Iterable[int]) -> list[RankStatus]:
    """The pages of those of ``ranks`` that write into this run directory (on nodes without a shared disk: this
    node's)."""
    found = []
    for number in ranks:
        try:
            data = read_regular(run_directory / DIRECTORY / f"{number:05d}", NOTE_BYTES)
        except OSError:
            continue
        if len(data) != LAYOUT.size or not data.startswith(MAGIC):
            continue
        _, rank, pid, step, count, since, beat, sequence, phase, collective, host = LAYOUT.unpack(data)
        texts = [text.rstrip(b"\0").decode(errors="replace") for text in (phase, collective, host)]
        found.append(RankStatus(rank, pid, step, count, since, beat, sequence, *texts))
    return found


def culprit(statuses: Sequence[RankStatus]) -> RankStatus | None:
    """The rank that the others wait for: one that is stopped, or was until another rank ended it, else the one that is
    furthest behind; None if none is behind. Ranks that have left wait for nobody."""
    for silent in ([one for one in statuses if one.stopped], [one for one in statuses if one.died]):
        if silent:
            return min(silent, key=lambda status: status.count)
    statuses = [status for status in statuses if status.phase != LEFT]
    if len(statuses) < 2:
        return None
    # In a pipeline those behind a late rank are behind it in count too: it is at the end of a chain of waiting ranks.
    awaited = [status for status in statuses if status.waits_for is None]
    if len(awaited) == 1:
        return awaited[0]
    statuses = awaited or statuses
    done = [(status.count, status.sequence) for status in statuses]
    return statuses[done.index(min(done))] if min(done) < max(done) else None


def stuck(statuses: Sequence[RankStatus], waited_s: float, run: Path) -> Problem:
    """HANG001 for ranks that wait in a collective that all of them have entered."""
    one = max(statuses, key=lambda status: (status.count, status.sequence))
    many = f"all {len(statuses)} ranks wait" if len(statuses) > 1 else "the only rank waits"
    what = f"{many} in {one.waiting} of step {one.step} for {waited_s:.0f} s, and no rank is behind the others"
    where = f"{one.doing}, host {one.host}; stacks in {run}/hang-step-{one.step}/"
    fix = "look for a failed device or link (nvidia-smi, dmesg; NCCL_DEBUG=INFO shows what NCCL does)"
    return Problem("HANG001", what, where, f"{fix}; then: {train_again(run)}")


def hang(statuses: Sequence[RankStatus], waited_s: float, run: Path) -> Problem | None:
    """HANG001 for the rank that the others wait for, or None when no rank stands out."""
    late = culprit(statuses)
    if late is None:
        return None
    others = [status for status in statuses if status.rank != late.rank]
    ahead = max(others, key=lambda status: (status.count, status.sequence)) if others else late
    state = f"{'is stopped' if late.stopped else 'is still'} in {late.doing}"
    due = f"has not entered {ahead.waiting} of step {ahead.step} for {waited_s:.0f} s"
    rest = f"the other {len(others)} rank{'s wait' if len(others) != 1 else ' waits'} there"
    if chain := [f"rank {one.rank} is {one.doing}" for one in others if one.waits_for is not None]:
        due, rest = f"has sent nothing for {waited_s:.0f} s", "; ".join(chain)
    what = f"rank {late.rank} (host {late.host}, pid {late.pid}) {due}; {rest}"
    where = f"rank {late.rank} {state} of step {late.step}; stacks in {run}/hang-step-{late.step}/"
    fix = f"check that process and its disk or network; then: {train_again(run)}"
    return Problem("HANG001", what, where, fix)
