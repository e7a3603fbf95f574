"""The whole command line with its launcher: killed, asked to stop, or with a rank that dies; no process is left, and
nothing is lost."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.runtime.faults.heartbeat import read_pages
from tests.faults.conftest import Make
from tests.faults.job import KILL, SAVE, STEPS, Job
from tests.faults.ranks import ROOT, environment
from tests.launch.sockets import network_addresses, stays_here
from tests.said import refuses, shows

pytestmark = pytest.mark.timeout(400)
"""Starting Python, torch and two ranks takes four seconds, and ten times as long on a machine that others use."""


class Launcher:
    """``shardwise train`` as a user starts it, in a process group of its own, as a shell would."""

    def __init__(self, job: Job, words: list[str], fault: str = "") -> None:
        self.job = job
        self.output = job.root / f"{job.name}.launcher.log"
        with self.output.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "shardwise", *words],
                cwd=ROOT,
                env=environment() | {"SHARDWISE_FAULT": fault},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self, seconds: float = 200.0) -> int:
        return self.process.wait(seconds)

    def said(self) -> str:
        return self.output.read_text()

    def until(self, true: Callable[[], bool], seconds: float = 200.0) -> None:
        """Wait for something that a rank does; fail when the launcher ends before."""
        end = time.monotonic() + seconds
        while not true():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < end, self.said()
            time.sleep(0.01)

    def ranks(self) -> list[int]:
        """The pids of its ranks."""
        return [page.pid for page in read_pages(self.job.directory, range(self.job.world))]


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    """Whether all of these processes end within so many seconds."""
    end = time.monotonic() + seconds
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended = select.select([handle], [], [], max(0.0, end - time.monotonic()))[0]
        os.close(handle)
        if not ended:
            return False
    return True


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.big
def test_a_rank_is_killed_under_the_launcher_and_the_same_command_goes_on(make: Make, whole: Job) -> None:
    job = make("launcher-rank")
    words = job.write()
    launcher = Launcher(job, words, f"reduce:{KILL}:1")
    assert launcher.wait() == 1
    assert job.fired(f"reduce-{KILL}-1")
    ranks = launcher.ranks()
    assert refuses(launcher.said(), "RUN004", "rank 1", ranks[1], "SIGKILL")
    assert "Connection" not in launcher.said() and "Traceback" not in launcher.said()
    assert gone(ranks, 0.0)
    assert job.saved() == [SAVE]
    again = Launcher(job, words)
    assert again.wait() == 0, again.said()
    assert f"resuming {job.directory} from step {SAVE}" in again.said()
    assert job.begun_at() == [0, SAVE]
    job.same_as(whole)


@pytest.mark.prove
def test_the_launcher_is_killed_and_no_rank_outlives_it(make: Make, whole: Job) -> None:
    """One rank sleeps for ever at step 7, and the other waits for it: only the kernel can end them."""
    job = make("launcher-killed")
    words = job.write()
    launcher = Launcher(job, words, f"data:{KILL}:1:hang")
    launcher.until(lambda: job.fired(f"data-{KILL}-1"))
    ranks = launcher.ranks()
    assert len(ranks) == 2 and not gone(ranks, 0.0)
    assert network_addresses(launcher.process.pid) == []
    assert all(stays_here(address) for rank in ranks for address in network_addresses(rank))
    launcher.process.kill()
    assert launcher.wait() == -signal.SIGKILL
    assert gone(ranks, 5.0)
    assert job.saved() == [SAVE]
    assert job.train(words) == [0, 0]
    assert job.begun_at() == [0, SAVE]
    job.same_as(whole)


@pytest.mark.prove
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_the_launcher_saves_and_stops(make: Make, whole: Job, number: signal.Signals) -> None:
    """SIGTERM to the launcher alone, as from a scheduler; Ctrl-C to all, as from a terminal. It comes while one rank is
    stopped at step 7, so that it is known when."""
    job = make(f"launcher-{number.name}")
    words = job.write()
    launcher = Launcher(job, words, f"data:{KILL}:1:SIGSTOP")
    launcher.until(lambda: job.fired(f"data-{KILL}-1") and stopped(launcher.ranks()[1]))
    ranks = launcher.ranks()
    if number == signal.SIGINT:
        os.killpg(launcher.process.pid, number)
    else:
        launcher.process.send_signal(number)
        launcher.until(lambda: pending(ranks[1], number))
    os.kill(ranks[1], signal.SIGCONT)
    assert launcher.wait() == 75, launcher.said()
    assert gone(ranks, 0.0)
    assert "asked to stop" in launcher.said() and f"shardwise train --resume {job.directory}" in launcher.said()
    reached = job.steps()[-1]
    assert KILL <= reached < STEPS
    assert job.saved() == [SAVE, reached]
    found = job.ended()
    assert (found.kind, found.step, found.restartable) == ("preempted", reached, True)
    page = re.search(rf"So far (\d+) of {STEPS} ", (job.directory / "report.html").read_text())
    assert page and SAVE <= int(page[1]) <= reached
    assert job.train(words) == [0, 0]
    assert job.begun_at() == [0, reached]  # no step is done twice
    job.same_as(whole)


def pending(pid: int, number: int) -> bool:
    """Whether a signal waits for a stopped process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


@pytest.mark.matrix
@pytest.mark.parametrize(("number", "rank"), [("SIGTERM", 1), ("SIGUSR1", 0)])
def test_a_request_to_one_rank_stops_all_of_them(make: Make, whole: Job, number: str, rank: int) -> None:
    job = make(f"one-{number}")
    words = job.write()
    assert job.train(words, {rank: f"forward:{KILL}:{rank}:{number}"}) == [75, 75]
    assert job.fired(f"forward-{KILL}-{rank}")
    reached = job.steps()[-1]
    assert reached in (KILL, KILL + 1)
    assert job.saved() == [SAVE, reached] and job.ended().kind == "preempted"
    assert job.train(words) == [0, 0]
    assert job.begun_at() == [0, reached]
    job.same_as(whole)


@pytest.mark.prove
def test_a_request_that_a_stopped_rank_cannot_follow_ends_as_a_hang(make: Make) -> None:
    """Not after the ten minutes in which ranks may save: the other rank waits for it as long as it always would."""
    job = make("launcher-silent")
    launcher = Launcher(job, job.write(run={"timeout_s": 10.0}), f"data:{KILL}:1:SIGSTOP")
    launcher.until(lambda: job.fired(f"data-{KILL}-1") and stopped(launcher.ranks()[1]))
    ranks = launcher.ranks()
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait(90.0) == 1, launcher.said()
    assert refuses(launcher.said(), "HANG001", "rank 1", fix="--resume")
    assert gone(ranks, 0.0) and job.saved() == [SAVE]
    found = job.ended()
    assert found.kind == "hang" and found.restartable


@pytest.mark.big
def test_a_second_ctrl_c_stops_at_once(make: Make, whole: Job) -> None:
    """The first cannot be followed, for a rank sleeps; the second does not wait for it. Nothing that was saved is
    harmed."""
    job = make("launcher-twice")
    words = job.write()
    launcher = Launcher(job, words, f"data:{KILL}:1:hang")
    launcher.until(lambda: job.fired(f"data-{KILL}-1"))
    ranks = launcher.ranks()
    before = job.last_checkpoint()
    os.killpg(launcher.process.pid, signal.SIGINT)
    launcher.until(lambda: "SIGINT: saving, then stopping; a second Ctrl-C stops at once" in launcher.said())
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(1.2)  # a second one that comes within a second is the first one, passed on twice
    assert not gone(ranks, 0.0)
    os.killpg(launcher.process.pid, signal.SIGINT)
    assert launcher.wait(20.0) == 130, launcher.said()
    assert shows(launcher.said(), "Ctrl-C", "without saving")
    assert gone(ranks, 5.0)
    assert "Traceback" not in launcher.said()
    assert job.saved() == [SAVE] and job.last_checkpoint() == before
    assert job.train(words) == [0, 0]
    assert job.begun_at() == [0, SAVE]
    job.same_as(whole)
