"""One process owns a run's directory: of several that want it at once, after one that was killed, from another machine,
and when it was lost."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.errors import OutputError
from shardwise.launch import rundir
from shardwise.runtime import owner
from shardwise.runtime.faults.guard import Guard, watching
from shardwise.runtime.faults.outcome import Exit, read_exit, write_exit
from shardwise.runtime.owner import Claim, Owner, Pace, check_free, claim, follow, standing
from shardwise.runtime.world import process
from tests.runtime.small_run import directory as run_of
from tests.runtime.small_run import plan, recipe
from tests.said import refusal, shows

RACE = """
import os, sys, time
from pathlib import Path
from shardwise.errors import OutputError
from shardwise.runtime.owner import claim
root = Path(sys.argv[1])
for number in range(10):
    directory = root / str(number)
    directory.mkdir()
    if number % 2:  # in the place of one that was killed
        pid = os.fork()
        if not pid:
            claim(directory)
            os.kill(os.getpid(), 9)
        os.waitpid(pid, 0)
        assert list(directory.glob(".owner-*"))
    begin, pids = time.monotonic() + 0.01, []
    answers, answer = os.pipe()
    end, close = os.pipe()
    for _ in range(6):
        if pid := os.fork():
            pids.append(pid)
            continue
        os.close(close)
        while time.monotonic() < begin:
            pass
        try:
            claim(directory)
        except OutputError as error:
            assert error.problems[0].code == "OUT005", error
            os.write(answer, b"-")
            os._exit(1)
        os.write(answer, b"+")
        os.read(end, 1)  # it lives until all others have looked at it
        os._exit(0)
    seen = b""
    while len(seen) < 6:
        seen += os.read(answers, 6)
    os.close(close)
    for pid in pids:
        os.waitpid(pid, 0)
    assert sorted(seen) == sorted(b"+-----"), (number, seen)
    assert len(list(directory.glob(".owner-*"))) == 1
"""


@pytest.mark.prove
def test_of_several_that_claim_at_once_one_wins(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", RACE, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and len(list(tmp_path.iterdir())) == 10


def refused(error: OutputError) -> str:
    (problem,) = error.problems
    assert (problem.code, error.exit_code) == ("OUT005", 73)
    return problem.what


class Clock:
    """Takes the place of sleeping: counts, and lets something happen after so many seconds."""

    def __init__(self, after_s: float = 1e9, act: object = None) -> None:
        self.slept_s, self.after_s, self.act = 0.0, after_s, act
        self.said: list[str] = []

    def pace(self) -> Pace:
        return Pace(sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        if self.slept_s >= self.after_s and callable(self.act):
            self.act()
            self.after_s = 1e9


def written(directory: Path, number: int, **changes: object) -> Owner:
    """The file of an owner that is like this process but for ``changes``."""
    made = replace(owner.me("other"), **changes)  # type: ignore[arg-type]
    (directory / f".owner-{number}").write_bytes(owner._text(made, 0))
    return made


def living() -> dict[str, object]:
    """The process that started this one, as an owner."""
    return {"pid": os.getppid(), "started": owner._started(os.getppid())}


def test_a_living_owner_is_named_at_once(tmp_path: Path) -> None:
    known, clock = written(tmp_path, 4, **living()), Clock()
    for attempt in (lambda: claim(tmp_path, "", clock.said.append, clock.pace()), lambda: check_free(tmp_path)):
        with pytest.raises(OutputError) as caught:
            attempt()
        assert refused(caught.value).endswith(f" pid {os.getppid()} on {known.host}")
    assert (clock.slept_s, clock.said) == (0.0, [])


def test_a_dead_owner_is_known_by_its_pid_and_when_it_started(tmp_path: Path) -> None:
    """One that was killed, one that its parent has not looked after, and a pid that somebody else has by now."""
    gone = subprocess.Popen(["true"])
    started = owner._started(gone.pid) or 1
    while Path(f"/proc/{gone.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    for dead in ({"pid": gone.pid, "started": started}, living() | {"started": 1}, {"pid": 2**22 + 1}):
        clock = Clock()
        written(tmp_path, 7, **dead)
        check_free(tmp_path)
        made = claim(tmp_path, "", clock.said.append, clock.pace())
        assert made.held() and made.number == 8 and not (tmp_path / ".owner-7").exists()
        assert (clock.slept_s, clock.said) == (0.0, [])
        made.release()
        assert not list(tmp_path.iterdir())
    gone.wait()


def test_an_owner_elsewhere_is_watched_for_a_minute(tmp_path: Path) -> None:
    """Nothing is compared with a clock: only whether its file changes."""
    known = written(tmp_path, 1, kernel="another/1", host="n2", pid=99)
    os.utime(tmp_path / ".owner-1", (0, 0))  # its clock is fifty years behind
    clock = Clock(after_s=47, act=lambda: (tmp_path / ".owner-1").write_bytes(owner._text(known, 1)))
    with pytest.raises(OutputError) as caught:
        claim(tmp_path, "", clock.said.append, clock.pace())
    assert refused(caught.value).endswith(" pid 99 on n2")
    assert clock.slept_s == 47
    [said] = clock.said
    assert said.startswith(f"{tmp_path} ") and "pid 99 on n2" in said and "60 s" in said
    check_free(tmp_path)  # which does not wait
    clock = Clock()
    assert claim(tmp_path, "", clock.said.append, clock.pace()).held()
    assert clock.slept_s == 60 and len(clock.said) == 1
    written(tmp_path, 9, kernel="another/1")
    clock = Clock(after_s=20, act=lambda: (tmp_path / ".owner-9").unlink())  # it ends while it is watched
    assert claim(tmp_path, "", clock.said.append, clock.pace()).held()
    assert clock.slept_s == 20


def test_a_directory_that_was_removed_holds_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    made = claim(directory)
    shutil.rmtree(directory)
    with pytest.raises(OutputError) as caught:
        made.check()
    assert shows(refused(caught.value), directory, "removed", "without saving")


def test_an_owner_beats_until_it_has_lost_its_directory(tmp_path: Path) -> None:
    made = claim(tmp_path, pace=Pace(beat_s=0.01))
    path = tmp_path / f".owner-{made.number}"
    seen = {path.read_bytes()}
    end = time.monotonic() + 20
    while len(seen) < 3 and time.monotonic() < end:
        seen.add(path.read_bytes())
    assert len(seen) == 3 and len({len(text) for text in seen}) == 1
    path.unlink()
    time.sleep(0.1)
    assert not list(tmp_path.iterdir())
    with pytest.raises(OutputError) as caught:
        made.check()
    assert shows(refused(caught.value), tmp_path, ".owner", "removed")
    assert "intact" not in refused(caught.value)
    other = written(tmp_path, 5)
    with pytest.raises(OutputError, match=refusal("OUT005", f"pid {other.pid}")):
        made.check()
    made.release()
    assert [path.name for path in tmp_path.iterdir()] == [".owner-5"]


def test_a_disk_that_does_not_answer_takes_nothing_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = claim(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(owner.os, "listdir", fail)
    assert made.held()


@pytest.mark.parametrize(("number", "why"), [(errno.ENOSPC, "no space left"), (errno.EROFS, "read-only file system")])
def test_a_disk_that_refuses_the_claim_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, why: str
) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(owner, "_text", fail)
    words = f"OUT002.*cannot write {tmp_path / 'run'}: {why}"
    with pytest.raises(OutputError, match=words), rundir.owned(tmp_path / "run", print):
        pass
    assert not list((tmp_path / "run").iterdir())  # no claim that nobody made stands in the way of the next start


def test_ranks_follow_rank_0_of_their_own_start(tmp_path: Path) -> None:
    assert standing(tmp_path) is None
    clock = Clock(after_s=3, act=lambda: claim(tmp_path, "mine"))
    written(tmp_path, 1, token="mine", pid=2**22 + 1)  # the same start before it was killed
    followed = follow(tmp_path, "mine", 600.0, clock.pace())
    assert 3 <= clock.slept_s < 4 and followed.held()
    assert standing(tmp_path) is not None
    with pytest.raises(OutputError, match=refusal("OUT005", "rank 0")):
        follow(tmp_path, "another", 600.0, clock.pace())
    assert clock.slept_s > 660
    written(tmp_path, 9, token="another")
    assert not followed.held()


def test_ranks_elsewhere_do_not_follow_who_had_the_same_name_and_is_dead(tmp_path: Path) -> None:
    """Of two starts by the same line of torchrun, the nodes having been started anew between them."""
    stale, clock = written(tmp_path, 1, token="mine", kernel="another/1", host="n1"), Clock()
    with pytest.raises(OutputError, match=refusal("OUT005", "rank 0")):
        follow(tmp_path, "mine", 60.0, clock.pace())
    clock = Clock(after_s=50, act=lambda: written(tmp_path, 2, token="mine", kernel="another/2", host="n1"))
    assert follow(tmp_path, "mine", 60.0, clock.pace()).held() and 50 <= clock.slept_s < 51
    clock = Clock(after_s=7, act=lambda: (tmp_path / ".owner-2").write_bytes(owner._text(stale, 1)))  # it lives
    assert follow(tmp_path, "mine", 60.0, clock.pace()).held() and 7 <= clock.slept_s < 8


def test_a_rank_outlives_rank_0_and_its_claim(tmp_path: Path) -> None:
    """Rank 0 may see first that another rank has failed: that one still leaves the cause."""
    made = claim(tmp_path, "mine")
    followed = follow(tmp_path, "mine", 60.0)
    made.release()
    assert followed.held() and not made.held()
    with pytest.raises(ZeroDivisionError), watching(tmp_path, replace(process(), rank=1), 60.0, followed):
        raise ZeroDivisionError("the cause")
    found = read_exit(tmp_path)
    assert found is not None and "the cause" in found.message
    written(tmp_path, 1, token="another")
    assert not followed.held()


def test_rank_0_stops_and_leaves_no_outcome_in_a_directory_that_it_lost(tmp_path: Path) -> None:
    made = claim(tmp_path)
    with (
        pytest.raises(OutputError, match=r"OUT005.*taken over"),
        watching(tmp_path, replace(process(), rank=0), 60.0, made) as watch,
    ):
        watch.fetch(1, iter(range(3)))
        written(tmp_path, 9)
        write_exit(tmp_path, Exit("done", 0, "of the new owner"))
        watch.enter("save")
    found = read_exit(tmp_path)
    assert found is not None and found.message == "of the new owner"
    other = Guard(tmp_path, replace(process(), rank=1), 60.0, made)  # the others hear of it from rank 0
    other.enter("save")
    other.close()


def test_a_run_that_lost_its_directory_does_not_call_anothers_checkpoint_its_own(tmp_path: Path) -> None:
    from shardwise.runtime.begin import Start
    from shardwise.runtime.loop import train

    made = recipe(tmp_path, "lost")
    run_of(made).mkdir(parents=True)
    mine = claim(run_of(made))

    def taken(state: object, stats: object) -> None:
        if state.step == 4:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGTERM)
        if state.step == 5:  # type: ignore[attr-defined]
            written(run_of(made), 9)
            (run_of(made) / "checkpoints" / "step-00000077").mkdir()

    with pytest.raises(OutputError, match=r"OUT005.*taken over"):
        train(made, plan(), (taken,), Start(claim=mine))
    assert sorted(path.name[5:] for path in (run_of(made) / "checkpoints").glob("step-*")) == ["00000003", "00000077"]
    assert read_exit(run_of(made)) is None and not Claim(run_of(made), mine.token).held()
