"""Inside a rank: the first cause is left in exit.json, printed by one rank only, and no traceback hides it."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cli import work as module
from shardwise.cli.app import main
from shardwise.cli.start import How
from shardwise.cli.work import work
from shardwise.data.whole import becoming
from shardwise.errors import DataError, OutputError, PreemptedError, Problem, ShardwiseError
from shardwise.launch.worker import LAUNCHER, STORE, TURN_S, start_name
from shardwise.runtime import owner
from shardwise.runtime.faults import guard
from shardwise.runtime.faults.outcome import Exit, read_exit, write_exit
from shardwise.runtime.owner import Claim, claim
from shardwise.runtime.world import process
from shardwise.spec.load import dump_recipe, load_recipe
from shardwise.spec.recipe import Recipe
from tests.said import refusal, refuses


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv(LAUNCHER, raising=False)
    Path("runs/a").mkdir(parents=True)
    claim(Path("runs/a"), start_name())  # as rank 0 does
    return load_recipe(None, ["run.name=a"])


def code(recipe: Recipe) -> int:
    done = work(recipe, How())
    return done.exit_code if isinstance(done, ShardwiseError) else 0


def run(recipe: Recipe, monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> int:
    def train(*_: object) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(module, "_train", train)
    return code(recipe)


PROBLEM = Problem("DATA004", "bad line", "x.jsonl:3", "repair it")


def test_a_cause_is_written_and_printed_with_its_rank(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(recipe, monkeypatch, DataError(PROBLEM)) == 65
    outcome = read_exit(Path("runs/a"))
    assert outcome is not None
    assert (outcome.kind, outcome.exit_code, outcome.rank, outcome.message) == ("error", 65, 1, "bad line")
    assert outcome.problems == [{"code": "DATA004", "what": "bad line", "where": "x.jsonl:3", "fix": "repair it"}]
    assert refuses(capsys.readouterr().err, "DATA004", "bad line", where="x.jsonl:3", fix="repair it")


def test_what_follows_from_another_ranks_failure_is_neither_written_nor_printed(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_exit(Path("runs/a"), Exit("error", 65, "first", rank=0))
    assert run(recipe, monkeypatch, DataError(PROBLEM)) == 65
    outcome = read_exit(Path("runs/a"))
    assert outcome is not None and outcome.message == "first"
    assert capsys.readouterr().err == ""


def test_our_launcher_prints_for_its_ranks(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LAUNCHER, "1")
    assert run(recipe, monkeypatch, PreemptedError(Problem("STOP001", "saved"))) == 75
    outcome = read_exit(Path("runs/a"))
    assert outcome is not None and outcome.kind == "preempted"
    assert capsys.readouterr().err == ""


def test_a_defect_keeps_its_traceback_in_the_run(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(recipe, monkeypatch, ZeroDivisionError("of ours")) == 70
    assert "Traceback (most recent call last)" in Path("runs/a/traceback-rank-1.txt").read_text()
    err = capsys.readouterr().err
    assert err.startswith("[rank 1] error[") and refuses(err, "BUG001", "ZeroDivisionError: of ours")
    assert "Traceback" not in err


def test_memory_that_the_system_refuses_is_no_defect(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Below `ulimit -v` libraries cannot be loaded, nor threads started."""
    assert run(recipe, monkeypatch, ImportError("x.so: failed to map segment from shared object")) == 1
    err = capsys.readouterr().err
    assert err.startswith("[rank 1] error[") and refuses(err, "MEM001", "x.so: failed to map")
    assert "`ulimit -v`" in err
    told = read_exit(Path("runs/a"))
    assert told is not None and (told.kind, told.exit_code) == ("memory", 1)


@pytest.mark.parametrize("ours", [False, True])
def test_a_disk_that_filled_up_is_no_defect(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ours: bool
) -> None:
    """Nor can the cause be written there, so that our launcher could print it."""
    error = OSError(errno.ENOSPC, "No space left on device", "runs/a/metrics.jsonl")
    if ours:
        monkeypatch.setenv(LAUNCHER, "1")

    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(module, "write_exit", full)
    assert run(recipe, monkeypatch, error) == 73
    said = capsys.readouterr().err
    assert said.startswith("[rank 1] error[OUT002]: ") and "\nwhere: runs/a/metrics.jsonl\n" in said
    assert "`shardwise train runs/a`\n" in said
    Path("runs/a/checkpoints/step-00000004").mkdir(parents=True)
    Path("runs/a/recipe.yaml").write_text(dump_recipe(recipe))
    assert run(recipe, monkeypatch, error) == 73
    assert "`shardwise train --resume runs/a`\n" in capsys.readouterr().err


@pytest.mark.parametrize("kept", [True, False])
def test_a_disk_that_fills_up_within_the_watch_is_the_cause(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: bool
) -> None:
    """The guard, which tells first, knows of a crash alone; a write to an open file has no path. The launcher looks in
    its own directory first: the cause is there where it could not be written beside the crash."""
    run_directory = Path("runs/a")
    monkeypatch.setenv(LAUNCHER, "1")
    monkeypatch.setenv(STORE, str(tmp_path / "store"))

    def write(directory: Path, outcome: Exit) -> None:
        if directory != tmp_path and not kept:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_exit(directory, outcome)

    def train(*_: object) -> None:
        with guard.watching(run_directory, replace(process(), rank=1), 20.0, owner.standing(run_directory)) as watch:
            watch.step = 7
            watch.enter("end")
            with becoming(run_directory / "hf"):
                raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(module, "_train", train)
    monkeypatch.setattr(module, "write_exit", write)
    assert code(recipe) == 73
    told = read_exit(run_directory if kept else tmp_path)
    assert told is not None and (told.kind, told.exit_code, told.step) == ("error", 73, 7 if kept else 0)
    assert [(each["code"], each["where"]) for each in told.problems] == [("OUT002", "runs/a/hf")]
    write_exit(run_directory, replace(told, pid=1))
    standing = read_exit(run_directory)
    assert standing is not None and (standing.kind, standing.pid) == ("error" if kept else "crash", os.getpid())


def test_our_launcher_finds_the_cause_elsewhere_where_the_disk_is_full(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """So that it is printed once, and not by every rank."""
    room = tmp_path / "room"
    room.mkdir()
    monkeypatch.setenv(LAUNCHER, "1")
    monkeypatch.setenv(STORE, str(room / "store"))

    def write(directory: Path, outcome: Exit) -> None:
        if directory != room:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_exit(directory, outcome)

    monkeypatch.setattr(module, "write_exit", write)
    assert run(recipe, monkeypatch, OSError(errno.ENOSPC, "No space left on device", "runs/a/metrics.jsonl")) == 73
    assert capsys.readouterr().err == ""
    told = read_exit(room)
    assert told is not None and told.problems[0]["code"] == "OUT002"
    assert "runs/a/metrics.jsonl: no space left" in told.problems[0]["what"]


def test_ranks_of_torchrun_do_not_touch_another_run(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs/a/checkpoints/step-00000004").mkdir(parents=True)
    Path("runs/a/recipe.yaml").write_text(dump_recipe(load_recipe(None, ["train.seq_len=9"])))
    monkeypatch.setenv("RANK", "0")
    write_exit(Path("runs/a"), Exit("done", 0, "finished", rank=0))
    with pytest.raises(OutputError, match=r"OUT001.*runs/a holds run"):
        run(recipe, monkeypatch, None)
    standing = read_exit(Path("runs/a"))
    assert standing is not None and standing.kind == "done"


def test_ranks_of_torchrun_are_refused_while_another_start_lives(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other one is the process that started this one. Rank 1 waits for rank 0, which torchrun sees fail."""
    other = replace(owner.me("other"), pid=os.getppid(), started=owner._started(os.getppid()))
    Path("runs/a/.owner-5").write_bytes(owner._text(other, 0))
    before = sorted(Path("runs/a").iterdir())
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(OutputError, match=refusal("OUT005", "runs/a", os.getppid(), other.host)):
        run(recipe, monkeypatch, None)
    monkeypatch.setenv("RANK", "1")
    waited: list[float] = []
    monkeypatch.setattr(owner, "PACE", owner.Pace(sleep=waited.append))
    monkeypatch.setattr(owner.follow, "__defaults__", (owner.PACE,))
    with pytest.raises(OutputError, match=r"rank 0 .*runs/a"):
        run(recipe, monkeypatch, None)
    assert sum(waited) > recipe.run.timeout_s and sorted(Path("runs/a").iterdir()) == before
    Path("runs/a/.owner-5").unlink()
    monkeypatch.setenv("RANK", "0")
    assert run(recipe, monkeypatch, None) == 0
    assert not list(Path("runs").glob("a/.owner-*"))


def test_a_rank_that_lost_its_directory_leaves_no_cause_there(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")

    def train(recipe: Recipe, how: How, claimed: Claim) -> None:
        Path("runs/a/.owner-9").touch()
        claimed.check()

    monkeypatch.setattr(module, "_train", train)
    assert code(recipe) == 73
    assert capsys.readouterr().err.startswith("error[OUT005]: runs/a is no longer")
    assert read_exit(Path("runs/a")) is None


def test_rank_0_of_torchrun_tells_first(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun ends all ranks as soon as one has ended: the cause must have been told by then."""
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    for rank, expected in (("0", []), ("1", [TURN_S])):
        monkeypatch.setenv("RANK", rank)
        waits.clear()
        assert main(["train", "train.seqlen=3"]) == 78
        assert waits == expected and "error[CFG001]" in capsys.readouterr().err
    write_exit(Path("runs/a"), Exit("error", 65, "first", rank=0))
    assert run(recipe, monkeypatch, DataError(PROBLEM)) == 65
    assert waits == [TURN_S] * 2


def test_success(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(recipe, monkeypatch, None) == 0
    assert read_exit(Path("runs/a")) is None
