"""Runs of the command line whose ranks run out of memory: what they learn is what the next plan alone would learn."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shardwise.cli.app import main
from shardwise.launch import local
from shardwise.launch.launchers import Ended
from shardwise.launch.worker import STORE
from shardwise.spec.load import load_plan
from tests.cli.test_replan import WORDS
from tests.faults.job import write_text
from tests.said import refuses, shows

FAULT = "SHARDWISE_FAULT"
SAVE = ("checkpoint.save_steps=4",)
KEYS = ("step", "tokens", "loss", "grad_norm", "learning_rate", "skipped")


def numbers(name: str) -> list[tuple[float, ...]]:
    lines = Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)[key] for key in KEYS) for line in lines]


@pytest.mark.prove
@pytest.mark.timeout(400)
def test_a_rank_that_runs_out_of_memory_once_and_a_run_that_does_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("RANK", "WORLD_SIZE", STORE):
        monkeypatch.delenv(name, raising=False)
    write_text(tmp_path / "text")

    monkeypatch.setenv(FAULT, "backward:3:1:oom")
    assert main(["train", *WORDS, *SAVE, "--run", "unsaved"]) == 0, capfd.readouterr()
    assert refuses(capfd.readouterr().err, "MEM002", "rank 1", as_warning=True)
    assert shows(
        Path("runs/unsaved/report.md").read_text(), "Planned again", "step 3", "train.micro_batch_size 16 -> 8"
    )
    assert "train.micro_batch_size 16" in Path("runs/unsaved/report.html").read_text()
    assert load_plan(Path("runs/unsaved/plan.yaml")).batch.micro_batch_size == 8

    monkeypatch.setenv(FAULT, "forward:6:0:oom")
    assert main(["train", *WORDS, *SAVE, "--run", "saved"]) == 0, capfd.readouterr()
    assert shows(capfd.readouterr().out, "resumed at step 4")
    assert [line[0] for line in numbers("saved")] == list(range(1, 10))

    monkeypatch.delenv(FAULT)
    assert main(["train", *WORDS, *SAVE, "--plan", "runs/unsaved/plan.yaml", "--run", "whole"]) == 0
    assert numbers("unsaved") == numbers("whole")
    for one, other in zip(numbers("saved"), numbers("whole"), strict=True):
        assert one == pytest.approx(other, rel=1e-6), one

    start = local.run_ranks

    def then_again(*given: object, **named: object) -> Ended:
        ended = start(*given, **named)  # type: ignore[arg-type]
        os.environ[FAULT] = "optimizer:7:1:oom"
        return ended

    monkeypatch.setattr(local, "run_ranks", then_again)
    monkeypatch.setenv(FAULT, "forward:6:0:oom")
    assert main(["train", *WORDS, *SAVE, "--run", "twice"]) == 1
    assert refuses(capfd.readouterr().err, "MEM001", "optimizer", 7, "once", where="rank 1", fix="recompute.mode=full")
    assert json.loads(Path("runs/twice/exit.json").read_text())["kind"] == "memory"
    assert main(["train", *WORDS, *SAVE, "--run", "twice"]) == 0  # goes on with no more memory than the next plan had
    assert shows(capfd.readouterr().err, "memory", "runs/twice")
    assert load_plan(Path("runs/twice/plan.yaml")).batch.micro_batch_size == 8
    assert [line[0] for line in numbers("twice")] == list(range(1, 10))
    assert len(Path("runs/twice/events.jsonl").read_text().split("planned again")) == 2
