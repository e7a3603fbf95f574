"""The table of runs: every state a run can be left in, without torch, and never an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.app import main
from shardwise.runtime.faults.outcome import Exit, write_exit
from shardwise.runtime.owner import claim
from tests.said import shows


def make(name: str, losses: list[float | None], exit_: Exit | None = None) -> Path:
    run = Path("runs") / name
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("train: {max_steps: 20}\n")
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if exit_:
        write_exit(run, exit_)
    return run


def states(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    assert main(["runs", "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_every_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    make("finished", [3.0] * 20, Exit("done", 0, ""))
    make("stopped", [3.0, 2.5], Exit("preempted", 75, "asked to stop"))
    make("failed", [3.0, None], Exit("hang", 1, "rank 1 is silent"))
    make("interrupted", [3.0])
    held = claim(make("running", [3.0, 2.0, 1.5]))
    damaged = make("damaged", [2.0])
    (damaged / "recipe.yaml").write_text("train: {max_stps: 20}\n")
    with (damaged / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "lo\xff')
    found = states(capsys)
    held.release()
    assert {name: row["state"] for name, row in found.items() if name not in ("running", "damaged")} == {
        "finished": "finished",
        "stopped": "stopped",
        "failed": "failed, hang (exit code 1)",
        "interrupted": "interrupted",
    }
    assert str(found["running"]["state"]).startswith("running, pid ")
    assert found["damaged"]["state"] == "damaged: unknown key `train.max_stps`"
    assert {name: row["step"] for name, row in found.items()} == {
        "finished": 20, "stopped": 2, "failed": 2, "interrupted": 1, "running": 3, "damaged": 1,
    }  # fmt: skip
    assert (found["running"]["loss"], found["failed"]["loss"], found["stopped"]["of"]) == (1.5, None, 20)
    assert states(capsys)["running"]["state"] == "interrupted"  # its owner let go and left no outcome


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 66
    assert "error[CFG011]: no directory runs" in capsys.readouterr().err
    Path("runs").mkdir()
    assert main(["runs"]) == 0 and shows(capsys.readouterr().out, "no runs")
    make("a", [3.25, 2.5], Exit("done", 0, ""))
    assert main(["runs"]) == 0
    table = capsys.readouterr().out
    (tmp_path / "runs" / "a" / "resumed").mkdir()
    (tmp_path / "runs" / "a" / "resumed" / "recipe.yaml").write_text("{}")
    assert main(["runs", "runs/a"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["a", "finished"]
    head, row = table.splitlines()
    assert head.split() == ["run", "state", "step", "loss", "saved", "last", "step", "size"]
    assert row.split()[:4] == ["a", "finished", "2/20", "2.500"] and "just now" in row
