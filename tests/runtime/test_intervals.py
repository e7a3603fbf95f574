"""How often a run saves and validates, and when it stops early."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardwise.data.epochs import steps_per_epochs
from shardwise.runtime.checkpoint.locate import verify
from shardwise.runtime.job import open_job
from shardwise.runtime.report.header import header
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import StepStats
from tests.runtime.small_run import directory, numbers, plan, recipe, train_here
from tests.said import shows

CHANGES = {
    "evaluate": {"eval_steps": 2, "early_stopping_patience": 2},
    "checkpoint": {"save_steps": 5, "save_total_limit": 1, "asynchronous": False},
    "train": {"max_steps": 40},
}


class Broken(Exception):
    pass


def spoil(state: TrainState, stats: StepStats) -> None:
    """From step 5 on the model only gets worse."""
    if state.step >= 5:
        for parameter in state.trained():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(state.step))
            parameter.data.add_(noise, alpha=0.5)


def break_off(state: TrainState, stats: StepStats) -> None:
    if state.step == 7:
        raise Broken


def events(run: Path, kind: str) -> list[int]:
    found = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["step"] for event in found if event["event"] == kind]


@pytest.mark.prove
def test_a_run_stops_when_validation_no_longer_improves(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Validated at 2, 4 (the lowest), 6 and 8; what was counted survives an interruption."""
    made = recipe(tmp_path, **CHANGES)
    train_here(made, (spoil,))
    whole = directory(made)
    assert shows(capfd.readouterr().out, "stopped early", "2 validations")
    assert shows((whole / "report.md").read_text(), "Stopped early", "2 validations")
    assert events(whole, "validation") == [2, 4, 6, 8] and events(whole, "stopped early") == [8]
    assert [verdict.step for verdict in verify(whole / "checkpoints")] == [8]  # the step it stopped at is saved
    assert (whole / "hf" / "model.safetensors").is_file() and "8 steps" in (whole / "report.md").read_text()
    again = recipe(tmp_path, "again", **CHANGES)
    with pytest.raises(Broken):
        train_here(again, (spoil, break_off))
    train_here(again, (spoil,))
    assert events(directory(again), "stopped early") == [8] and numbers(directory(again)) == numbers(whole)


def test_intervals_in_epochs(tmp_path: Path) -> None:
    made = recipe(tmp_path, checkpoint={"save_steps": None, "saves_per_epoch": 4}, evaluate={"evals_per_epoch": 2})
    job = open_job(made, plan())
    epoch = steps_per_epochs(job.windows, 4, 1)
    assert epoch > 40 and (job.save_steps, job.eval_steps) == (epoch // 4, epoch // 2)


def test_a_validation_is_bounded_in_proportion_to_the_run(tmp_path: Path) -> None:
    """A fifth of the samples that are trained on, and no fewer than a step's; the same for any layout."""
    for steps, read in ((1, 4), (5, 4), (20, 16), (40, 32)):
        made = recipe(tmp_path, train={"max_steps": steps}, evaluate={"max_batches": None})
        found = {len(open_job(made, plan(world=world)).evaluated) for world in (1, 2)}
        assert found == {read}, steps
    job = open_job(made, plan())
    assert job.held_out is not None and shows(header(job), "validation", 32, len(job.held_out))
    endless = open_job(recipe(tmp_path, train={"max_steps": 10**6}, evaluate={"max_batches": None}), plan())
    assert len(endless.evaluated) == len(job.held_out) and "validation on" not in header(endless)
