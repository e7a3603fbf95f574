"""The best checkpoint of a run: kept beside the newest, found again after an interruption, exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardwise.cli.app import main
from shardwise.runtime.checkpoint.locate import best, locate_best, verify
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import StepStats
from tests.runtime.small_run import directory, recipe, train_here, weights_hash
from tests.said import shows

CHANGES = {
    "checkpoint": {"keep_best": True, "save_steps": 3},
    "evaluate": {"eval_steps": 2},
    "train": {"max_steps": 12},
}


class Broken(Exception):
    pass


def spoil(state: TrainState, stats: StepStats) -> None:
    """After step 5 the model is thrown back, so that what it was at step 4 is never reached again."""
    if state.step == 5:
        for parameter in state.trained():
            parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.5)


def break_off(state: TrainState, stats: StepStats) -> None:
    if state.step == 11:
        raise Broken


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved at 2 and 4 because they were the best, at 3, 6, 9, 11 and 12 because it was time."""
    made = recipe(tmp_path_factory.mktemp("best"), **CHANGES)
    with pytest.raises(Broken):
        train_here(made, (spoil, break_off))
    train_here(made)
    return directory(made)


@pytest.mark.prove
def test_best_and_last_are_kept(run: Path) -> None:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    losses = {event["step"]: event["nats_per_token"] for event in events if event["event"] == "validation"}
    assert sorted(losses) == [2, 4, 6, 8, 10, 12] and min(losses, key=losses.__getitem__) == 4
    assert losses[8] > losses[12] > losses[4]  # better than before is not the best
    committed = [event["step"] for event in events if event["event"] == "checkpoint committed"]
    assert committed == [2, 3, 4, 6, 9, 12]
    assert [(verdict.step, verdict.problem) for verdict in verify(run / "checkpoints")] == [
        (12, None),
        (9, None),
        (4, None),
    ]
    found = best(run / "checkpoints")
    assert found is not None and found[:2] == (losses[4], 4)


def test_it_is_exported_and_the_newest_is_still_what_resume_takes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = weights_hash(run)
    assert shows((run / "report.md").read_text(), "Best checkpoint", "step 4", "loss")
    assert main(["export", str(run), "--best", "-o", str(run / "best"), "--json"]) == 0
    kept = load_file(run / "checkpoints" / "step-00000004" / "model-00000-of-00001.safetensors")
    written = load_file(run / "best" / "model.safetensors")
    assert torch.equal(written["model.norm.weight"], kept["model.norm.weight"])
    assert torch.equal(written["model.embed_tokens.weight"], kept["model.embed.weight"])
    assert main(["export", str(run), "--json"]) == 0
    assert weights_hash(run) == last
    capsys.readouterr()
    for flags in ([], ["--best"]):
        assert main(["generate", str(run), "--prompt", "line ", "--tokens", "3", "--json", *flags]) == 0
    assert main(["export", str(run), "--best", "--step", "4"]) == 2
    assert main(["export", str(run), "--best", "--adapter"]) == 2
    assert shows(capsys.readouterr().err, "no adapter")
    assert main(["export", str(run), "--step", "3"]) == 66
    said = capsys.readouterr().err
    assert said.startswith("error[CKPT001]: ") and "step 3\n" in said and "`--step 12`" in said and "12, 9, 4" in said


def test_a_run_without_validation_has_no_best(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000004")
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000012")
    assert main(["export", str(tmp_path / "run"), "--best"]) == 66
    assert "error[CKPT021]: " in capsys.readouterr().err


def test_a_damaged_best_gives_way_to_the_next(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    assert locate_best(tmp_path / "run").name == "step-00000004"
    (tmp_path / "run/checkpoints/step-00000004/state.json").unlink()
    assert locate_best(tmp_path / "run").name == "step-00000012"
