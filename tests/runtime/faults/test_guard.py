"""Phases and faults, hangs and their culprit, requests to stop, the first cause."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError, PreemptedError, Problem, TrainingError
from shardwise.runtime.faults import guard
from shardwise.runtime.faults.guard import Guard, InjectedFault, StopRequest, diagnose, watching
from shardwise.runtime.faults.heartbeat import LEFT, Page, RankStatus, culprit, hang, read_pages, stuck
from shardwise.runtime.faults.outcome import Exit, clear_exit, read_exit, write_exit
from shardwise.runtime.owner import claim
from shardwise.runtime.world import Process, process
from tests.said import shows

GLOO_SILENT = "[unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation to complete"
GLOO_GONE = "[pair.cc:553] Connection closed by peer [127.0.0.1]:1953"


def me(rank: int = 0, world_size: int = 2, **changes: Any) -> Process:
    named = {"rank": rank, "local_rank": rank, "world_size": world_size, "local_world_size": world_size}
    return replace(process(), **named, **changes)


def status(rank: int, count: int, sequence: int = 0, phase: str = "forward") -> RankStatus:
    return RankStatus(rank, 1, 7, count, 0.0, 0.0, sequence, phase, f"all_reduce #{sequence}", "elsewhere")


def test_a_fault_fires_at_its_phase_step_and_rank_once(tmp_path: Path) -> None:
    watch = Guard(tmp_path, me(1, fault="backward:2:1:raise"), 60.0)
    batches = iter(range(9))
    watch.fetch(1, batches)
    watch.enter("backward")
    assert watch.fetch(2, batches) == 1
    watch.enter("forward")
    with pytest.raises(RuntimeError, match=r"backward .*step 2 .*rank 1"):
        watch.enter("backward")
    assert (tmp_path / "fault-backward-2-1").exists()
    watch.enter("backward")  # a second time the marker stands in its way
    watch.close()
    other = Guard(tmp_path / "other", me(fault="data:1:1:raise"), 60.0)
    other.fetch(1, batches)
    other.close()
    assert not (tmp_path / "other" / "fault-data-1-1").exists()


def test_orders_to_fail() -> None:
    assert InjectedFault.parse("") is None
    assert InjectedFault.parse("clip:7:1") == InjectedFault("clip", 7, 1, "SIGKILL")
    assert InjectedFault.parse("save:5:0:SIGTERM") == InjectedFault("save", 5, 0, "SIGTERM")


@pytest.mark.prove
def test_a_killed_process_has_left_its_mark(tmp_path: Path) -> None:
    code = f"from shardwise.runtime.faults.guard import *; InjectedFault('data', 1, 0).fire(Path({str(tmp_path)!r}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["fault-data-1-0"]


def test_pages_can_be_read_by_others(tmp_path: Path) -> None:
    page = Page(tmp_path, 3)
    page.enter("reduce", 12)
    page.beat("reduce_scatter #1559", 1559)
    [found] = read_pages(tmp_path, range(4))
    assert (found.rank, found.pid, found.step, found.phase, found.count) == (3, os.getpid(), 12, "reduce", 1)
    assert (found.collective, found.sequence) == ("reduce_scatter #1559", 1559)
    assert not found.stopped
    page.close()
    (tmp_path / "ranks" / "00004").write_bytes(b"torn")
    assert len(read_pages(tmp_path, range(5))) == 1
    assert read_pages(tmp_path, range(3)) == []


def test_the_culprit_has_done_least() -> None:
    assert culprit([status(0, 9), status(1, 8), status(2, 9)]) == status(1, 8)
    assert culprit([status(0, 9, 21), status(1, 9, 20)]) == status(1, 9, 20)
    assert culprit([status(0, 8, 21), status(1, 8, 0), status(2, 9, 21)]) == status(1, 8, 0), "of two, by collectives"
    assert culprit([status(0, 9, 21), status(1, 9, 21)]) is None
    assert culprit([status(0, 9)]) is None
    assert culprit([replace(status(0, 10), phase=LEFT), status(1, 9), status(2, 9)]) is None, (
        "who has left waits for none"
    )


def test_a_stopped_process_is_the_culprit(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        page = Page(tmp_path, 0)
        ours = replace(page.status, count=5)
        page.close()
        stopped = replace(ours, rank=1, pid=child.pid, count=7)
        assert culprit([replace(ours, count=7), stopped]) is None
        child.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while not stopped.stopped and time.monotonic() < deadline:
            time.sleep(0.01)
        assert culprit([ours, stopped]) == stopped
        child.kill()  # as the first rank does that sees it: for the next one it is still the culprit, not a good rank
        child.wait()
        behind = replace(ours, rank=2, count=4)
        assert culprit([ours, stopped, behind]) == stopped
    finally:
        child.kill()
        child.wait()


def test_a_hang_names_rank_phase_and_collective(tmp_path: Path) -> None:
    late = status(5, 8, 1558, "data")
    problem = hang([status(0, 9, 1559), late, status(1, 9, 1559)], 60.0, tmp_path)
    assert problem is not None and problem.code == "HANG001"
    assert shows(problem.what, "rank 5", "host elsewhere", "pid 1") and "all_reduce #1559 of step 7" in problem.what
    assert "other 2 ranks" in problem.what
    assert shows(problem.where, "rank 5", "phase data", "step 7")
    assert f"then: shardwise train {tmp_path}" in problem.fix


def test_ranks_that_wait_for_none_of_them_are_told_with_their_collective(tmp_path: Path) -> None:
    """All have entered it: a device or a link has failed."""
    problem = stuck([status(0, 9, 21, "clip"), status(1, 9, 21, "clip")], 60.0, tmp_path)
    assert problem.code == "HANG001"
    assert problem.what.startswith("all 2 ranks ") and "all_reduce #21 of step 7" in problem.what
    assert "phase clip" in problem.where
    assert "nvidia-smi" in problem.fix and f"then: shardwise train {tmp_path}" in problem.fix


@pytest.mark.parametrize("leaves", [False, True])
def test_a_rank_of_this_node_that_died_is_missed_and_one_that_left_is_not(tmp_path: Path, leaves: bool) -> None:
    lives = "page = Page(Path(sys.argv[1]), 1); page.enter(sys.argv[2], 7); print(flush=True); sys.stdin.read()"
    phase = LEFT if leaves else "forward"
    code = f"import sys; from shardwise.runtime.faults.heartbeat import *; {lives}"
    watch = Guard(tmp_path, me(), 60.0)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, tmp_path, phase], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None and child.stdout.readline()
        assert watch.gone() is None
        child.kill()
    found = watch.gone()
    watch.close()
    assert found is None if leaves else (found is not None and (found.rank, found.pid) == (1, child.pid))
    early = Guard(tmp_path, me(), 60.0)
    assert early.gone() is None, "the page of an earlier start"
    early.close()


def test_a_timeout_is_told_as_the_hang_that_it_is(tmp_path: Path) -> None:
    late = Page(tmp_path, 1)
    ours = Page(tmp_path, 0)
    ours.enter("count", 3)
    told = diagnose(RuntimeError(GLOO_SILENT), tmp_path, me(), 10.0)
    assert isinstance(told, TrainingError) and told.problems[0].code == "HANG001"
    late.enter("count", 3)
    level = diagnose(RuntimeError(GLOO_SILENT), tmp_path, me(), 10.0)
    assert isinstance(level, TrainingError) and level.problems[0].code == "LOST001"
    gone = diagnose(RuntimeError(GLOO_GONE), tmp_path, me(), 10.0)
    assert isinstance(gone, TrainingError) and shows(gone.problems[0].where, "phase count", "step 3")
    bug = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert diagnose(bug, tmp_path, me(), 10.0) is bug
    for page in (late, ours):
        page.close()


def test_the_first_cause_stands_and_consequences_give_way(tmp_path: Path) -> None:
    write_exit(tmp_path, Exit("peer_lost", 1, "rank 1 went away"))
    write_exit(tmp_path, Exit("crash", 70, "the cause", rank=1))
    write_exit(tmp_path, Exit("error", 78, "too late", rank=2))
    write_exit(tmp_path, Exit("peer_lost", 1, "later still", rank=3))
    found = read_exit(tmp_path)
    assert found is not None and (found.kind, found.message, found.rank) == ("crash", "the cause", 1)
    clear_exit(tmp_path)
    assert read_exit(tmp_path) is None and not list(tmp_path.iterdir())


ENDS = [
    (ConfigError(Problem("CFG004", "a wrong value")), "error", 78, False),
    (PreemptedError(Problem("STOP001", "asked to stop")), "preempted", 75, True),
    (TrainingError(Problem("MEM001", "no memory")), "memory", 1, False),
    (ZeroDivisionError("division by zero"), "crash", 70, False),
    (RuntimeError(GLOO_GONE), "peer_lost", 1, True),
    (KeyboardInterrupt(), "error", 130, True),
]


@pytest.mark.parametrize(("error", "kind", "code", "restartable"), ENDS)
def test_how_a_run_ended_is_left_behind(
    tmp_path: Path, error: BaseException, kind: str, code: int, restartable: bool
) -> None:
    with pytest.raises(BaseException) as raised, watching(tmp_path, me(), 60.0) as watch:
        watch.fetch(4, iter([0]))
        watch.enter("clip")
        raise error
    assert raised.value is error or raised.value.__cause__ is error
    found = read_exit(tmp_path)
    assert found is not None
    assert (found.kind, found.exit_code, found.restartable) == (kind, code, restartable)
    assert (found.step, found.phase, found.rank) == (4, "clip", 0)


def test_a_good_end_is_left_behind_too_and_replaces_an_old_one(tmp_path: Path) -> None:
    write_exit(tmp_path, Exit("crash", 70, "an earlier start"))
    with watching(tmp_path, me(), 60.0):
        pass
    found = read_exit(tmp_path)
    assert found is not None and (found.kind, found.exit_code) == ("done", 0)


def test_a_cause_that_is_told_before_rank_0_is_there_stands(tmp_path: Path) -> None:
    """Whoever claimed the directory has forgotten the outcome of an earlier start."""
    write_exit(tmp_path, Exit("crash", 70, "of this start", rank=1))
    with pytest.raises(TrainingError), watching(tmp_path, me(), 60.0, claim(tmp_path)):
        raise RuntimeError("Connection closed by peer")
    found = read_exit(tmp_path)
    assert found is not None and found.message == "of this start"


def test_a_disk_that_refuses_the_outcome_hides_no_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(guard, "write_exit", full)
    with pytest.raises(PreemptedError), watching(tmp_path, me(), 60.0):
        raise PreemptedError(Problem("STOP001", "asked to stop"))


def test_an_outcome_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On many file systems of object stores, and on exFAT."""

    def link(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    write_exit(tmp_path, Exit("crash", 70, "the cause", rank=1))
    write_exit(tmp_path, Exit("error", 78, "too late", rank=2))
    found = read_exit(tmp_path)
    assert found is not None and found.message == "the cause"
    assert [path.name for path in tmp_path.iterdir()] == ["exit.json"]


def test_a_rank_that_stands_still_writes_its_stacks(tmp_path: Path) -> None:
    watch = Guard(tmp_path, me(), 0.4)
    watch.first_step = 1
    watch.step = 5
    watch.enter("forward")
    path = tmp_path / "hang-step-5" / "rank-00000.txt"
    deadline = time.monotonic() + 10
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    watch.close()
    text = path.read_text()
    assert shows(text, "phase forward", "step 5")
    assert "test_a_rank_that_stands_still_writes_its_stacks" in text


def test_a_disk_that_refuses_the_stacks_ends_no_watch(tmp_path: Path) -> None:
    """Under NCCL nothing but the watch ends a rank that waits for ever."""
    (tmp_path / "hang-step-5").touch()
    watch = Guard(tmp_path, me(), 0.4)
    watch.first_step = 1
    watch.step = 5
    watch.enter("forward")
    deadline = time.monotonic() + 10
    while watch._dumped_count < 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    watch._thread.join(0.2)
    assert watch._dumped_count > 0 and watch._thread.is_alive()
    watch.close()


def test_the_first_steps_and_slow_phases_have_more_time(tmp_path: Path) -> None:
    watch = Guard(tmp_path, me(), 60.0)
    watch.fetch(1, iter([0]))
    assert watch.patience_s() == 600.0
    watch.step = 9
    assert watch.patience_s() == 60.0
    for phase in ("save", "compare"):
        watch.enter(phase)
        assert watch.patience_s() == 600.0
    watch.close()


def test_ctrl_c_asks_and_a_second_one_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(guard.time, "monotonic", lambda: now[0])
    request = StopRequest()
    assert not request
    request.receive(signal.SIGINT, None)
    assert request and request.name == "SIGINT"
    now[0] += 0.5
    request.receive(signal.SIGINT, None)  # the same key press, passed on by the launcher
    now[0] += 2.0
    request.receive(signal.SIGTERM, None)
    with pytest.raises(KeyboardInterrupt):
        request.receive(signal.SIGINT, None)


def test_signals_are_flags_inside_and_as_before_outside() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with guard.stop_requests() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.name == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_poisoned_run_is_told_with_its_samples() -> None:
    problem = guard.poisoned("no loss", 9, list(range(40, 60)), Path("checkpoints/step-00000003"))
    assert (problem.code, problem.what) == ("NUM001", "no loss")
    assert "step-00000003" in problem.fix
    assert "step-" not in guard.poisoned("no loss", 9, [40], None).fix
    assert problem.where == "step 9, samples 40, 41, 42, 43, 44, 45, 46, 47, ..."
