"""Pipes, devices and endless files in the place of what is read: told at once, and never waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.cli.app import main
from shardwise.errors import OutputError
from shardwise.launch.rundir import owned
from shardwise.runtime import owner
from shardwise.runtime.faults.outcome import Exit, read_exit, write_exit
from shardwise.runtime.metrics.json_lines import Lines
from shardwise.runtime.metrics.log import keep_until

pytestmark = pytest.mark.timeout(30)


def endless(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**42)


KINDS: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "larger than": endless,
}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return str(request.param)


def run_with(name: str, kind: str) -> Path:
    """A run that has ended, with ``name`` in it of that kind."""
    run = Path("runs/a")
    run.mkdir(parents=True)
    write_exit(run, Exit("done", 0, ""))
    (run / "recipe.yaml").write_text("train: {max_steps: 20}\n")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (run / name).unlink(missing_ok=True)
    KINDS[kind](run / name)
    return run


@pytest.mark.parametrize("words", [["plan", "r.yaml"], ["train", "r.yaml"], ["train", "--plan", "r.yaml", "--dry-run"]])
def test_a_recipe_or_a_plan(kind: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    KINDS[kind](Path("r.yaml"))
    code = main(words)
    said = capsys.readouterr().err
    assert (code, said.partition(":")[0]) == ((77, "error[SEC002]") if kind == "larger than" else (66, "error[CFG011]"))
    assert f"r.yaml is {kind}" in said or f"r.yaml: it is {kind}" in said


@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl", "exit.json", ".owner-3"])
def test_a_file_of_a_run_that_is_listed(kind: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_with(name, kind)
    assert main(["runs"]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    states = {"recipe.yaml": "damaged: ", "exit.json": "damaged: exit.json"}
    assert row.startswith("a    ") and states.get(name, "finished") in row


@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl", "events.jsonl", "run.json", "report.md"])
def test_a_file_of_a_run_that_is_compared(kind: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_with(name, kind)
    (other := Path("runs/b")).mkdir()
    (other / "recipe.yaml").write_text("train: {max_steps: 20}\n")
    (other / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    code = main(["compare", "runs/a", "runs/b"])
    assert code == (66 if name == "recipe.yaml" and kind != "larger than" else 0)
    assert "BUG001" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl", "events.jsonl", ".owner-3", "plan.yaml"])
def test_a_run_does_not_begin_beside_one(kind: str, name: str) -> None:
    run = run_with(name, kind)
    if kind == "larger than" and not name.endswith(".jsonl"):
        name = ".owner-3"  # the others are written, or read with their own bounds
        endless(run / name)
    with pytest.raises(OutputError, match=rf"OUT002.*{name}.* is {kind}"), owned(run, print):
        pass
    assert owner.holder(run) is None


def test_logs_and_outcomes_that_no_run_writes_are_not_taken_in(kind: str) -> None:
    run = run_with("exit.json", kind)
    assert read_exit(run) is None
    (run / "metrics.jsonl").unlink()
    KINDS[kind](run / "metrics.jsonl")
    with pytest.raises(OSError, match=f"it is {kind}"):
        keep_until(run / "metrics.jsonl", 3)


def test_a_log_that_was_cut_off_goes_on_in_a_line_of_its_own(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    for before, after in ((None, "{}\n"), ("a\n", "a\n{}\n"), ("a", "a\n{}\n")):
        log.unlink(missing_ok=True) if before is None else log.write_text(before)
        lines = Lines(log)
        lines.write({})
        lines.close()
        assert log.read_text() == after
