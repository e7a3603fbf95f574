"""A run from beginning to end in one process, interrupted in every way that one process can be."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwise.cli.app import main
from shardwise.data import tokens
from shardwise.errors import DataError, OutputError, PreemptedError, TrainingError
from shardwise.launch import rundir
from shardwise.methods import loss as token_loss
from shardwise.methods import pretrain
from shardwise.runtime import begin, end, loop
from shardwise.runtime.checkpoint import commit
from shardwise.runtime.checkpoint.storage import ShardWriter
from shardwise.runtime.faults.outcome import read_exit
from shardwise.runtime.job import Job
from shardwise.runtime.loop import train
from shardwise.runtime.metrics import measure, profile
from shardwise.runtime.metrics.log import Log
from shardwise.runtime.report import sample
from shardwise.runtime.report.report import Report
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import StepStats
from shardwise.spec.load import load_recipe
from shardwise.spec.plan import Precision
from shardwise.spec.recipe import Recipe
from tests.runtime import small_run
from tests.runtime.small_run import MODEL, directory, numbers, recipe, train_here, weights_hash
from tests.said import refusal, refuses, shows


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loop")


@pytest.fixture(scope="module")
def whole(root: Path) -> Path:
    """A run that nothing interrupted."""
    made = recipe(root, "whole", evaluate={"eval_steps": 4})
    train_here(made)
    return directory(made)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every save takes two seconds to write."""
    write = ShardWriter.write_data

    def slowly(self: ShardWriter, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        time.sleep(2)
        return write(self, plan, planner)

    monkeypatch.setattr(ShardWriter, "write_data", slowly)


class Broken(Exception):
    pass


def at(step: int, act: Any) -> Any:
    """An ``after_step`` that acts once."""

    def after(state: TrainState, stats: StepStats) -> None:
        if state.step == step:
            act(state)

    return (after,)


def fail(state: TrainState) -> None:
    raise Broken


def test_a_run_that_fails_waits_for_the_save_in_flight(root: Path, slow_disk: None) -> None:
    made = recipe(root, "failed")
    with pytest.raises(Broken):
        train_here(made, at(4, fail))
    assert (directory(made) / "checkpoints" / "step-00000003").exists()
    events = [json.loads(line) for line in (directory(made) / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "checkpoint committed"] == [3]


def test_what_was_saved_is_said_when_the_last_step_was_not(root: Path) -> None:
    """Its loss was not finite, so the stop saves nothing."""

    def poison(state: TrainState) -> None:
        state.parameters()["norm.weight"].data.fill_(torch.nan)
        os.kill(os.getpid(), signal.SIGTERM)

    made = recipe(root, "stopped-poisoned", checkpoint={"asynchronous": False})
    with pytest.raises(PreemptedError, match=refusal("STOP001", "SIGTERM", 3, 8)):
        train_here(made, at(4, poison))


@pytest.mark.prove
def test_a_run_that_could_not_keep_its_last_checkpoint_says_so_and_has_its_model(
    root: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The directory is removed while it trains: all steps are done, yet that is no success."""
    made = recipe(root, "unkept", evaluate={"eval_steps": 4}, checkpoint={"asynchronous": False})
    with pytest.raises(OutputError) as raised:
        train_here(made, at(7, lambda state: shutil.rmtree(directory(made) / "checkpoints")))
    [problem] = raised.value.problems
    assert (raised.value.exit_code, problem.code) == (73, "CKPT023")
    assert shows(problem.what, 8, "not there")
    assert f"{directory(made)}/hf" in problem.fix and "--resume" not in problem.fix
    assert weights_hash(directory(made)) == weights_hash(whole)
    assert shows(capsys.readouterr().out, "NOT SAVED", 8, "not there")
    assert shows((directory(made) / "report.md").read_text(), "Not saved", 8, "not there")
    found = read_exit(directory(made))
    assert found is not None and (found.kind, found.exit_code) == ("error", 73)


@pytest.mark.prove
def test_a_disk_too_full_for_the_last_checkpoint_is_no_success(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps after the newest that is there can be done again."""
    made = recipe(root, "unkept-full", checkpoint={"asynchronous": False})
    full = shutil._ntuple_diskusage(10**9, 10**9, 0)
    with pytest.raises(OutputError, match=refusal("CKPT023", 8, "OUT003", "0.000 GB")) as raised:
        train_here(made, at(7, lambda state: monkeypatch.setattr(commit.shutil, "disk_usage", lambda path: full)))
    assert shows(raised.value.problems[0].fix, f"`shardwise train --resume {directory(made)}`", 6)
    assert (directory(made) / "hf" / "model.safetensors").exists()


@pytest.mark.prove
def test_a_step_is_not_longer_for_the_save_before_it(root: Path, slow_disk: None) -> None:
    made = recipe(root, "slow-disk", train={"max_steps": 4}, checkpoint={"asynchronous": False})
    train_here(made)
    rows = [json.loads(line) for line in (directory(made) / "metrics.jsonl").read_text().splitlines()]
    assert rows[3]["seconds"] < 2


def test_an_export_has_the_tokenizer_of_the_run(whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever has become of the text; and a run may be called as a checkpoint is."""
    run = shutil.copytree(whole, tmp_path / "step-decay")
    written = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(written.replace(str(whole.parents[1] / "text"), str(tmp_path / "gone")))
    assert main(["export", str(run), "-o", str(tmp_path / "out")]) == 0, capfd.readouterr()
    kept = [path.read_bytes() for path in (whole / "hf" / "tokenizer.json", tmp_path / "out" / "tokenizer.json")]
    assert kept[0] == kept[1] and str(tmp_path / "gone") in (run / "recipe.yaml").read_text()
    (run / "hf" / "model.safetensors").unlink()
    os.utime(run / "hf" / "config.json", (0, 0))  # older than the newest checkpoint, which is taken then
    assert main(["generate", str(run), "--prompt", "line", "--tokens", "2"]) == 0, capfd.readouterr()


def test_a_recipe_that_does_not_fit_the_checkpoints_leaves_the_run_alone(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole.parent.parent, tmp_path, dirs_exist_ok=True)
    run = tmp_path / "runs" / "whole"
    kept = (run / "recipe.yaml").read_bytes()
    made = recipe(tmp_path, "whole", model={"config": MODEL | {"hidden_size": 32}})
    with pytest.raises(DataError, match="CKPT002"):
        train_here(made)
    assert (run / "recipe.yaml").read_bytes() == kept


def test_a_recipe_that_was_edited_is_compared_with_what_the_run_was_trained_with(whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "whole")

    def edited(before: str, after: str) -> Recipe:
        text = (whole / "recipe.yaml").read_text()
        (run / "recipe.yaml").write_text(text.replace(before, after))
        assert before in text
        return load_recipe(run / "recipe.yaml")

    assert rundir.resuming(run, 8, load_recipe(run / "recipe.yaml")) == f"resuming {run} from step 8"
    faster = edited("learning_rate: 0.01", "learning_rate: 0.5")
    assert rundir.check_standing(run, faster, resume=True) == 8
    assert shows(rundir.resuming(run, 8, faster), run, 8, "optim.learning_rate 0.5", 0.01)
    with pytest.raises(OutputError, match=r"step 8.*optim.learning_rate 0.5 \(was 0.01\)"):
        rundir.check_standing(run, faster, resume=False)
    with pytest.raises(DataError, match=r"CKPT022.*run.seed 5 \(was 0\)"):
        rundir.check_standing(run, edited("seed: 0", "seed: 5"), resume=True)
    for path in (run / "checkpoints").glob("*/state.json"):  # nothing that is damaged is believed
        path.write_text(path.read_text().replace('"optim.learning_rate": 0.01', '"optim.learning_rate": 0.07'))
    assert rundir.resuming(run, 8, faster).endswith("; run.seed 0 (was 5); optim.learning_rate 0.5 (was 0.01)")


def test_a_run_leaves_everything_that_is_promised(whole: Path) -> None:
    names = {path.name for path in whole.iterdir()}
    end = json.loads((whole / "hf" / "generation_config.json").read_text())["eos_token_id"]
    assert end == tokens.open_directory(whole / "tokenizer").eot_id
    assert {"recipe.yaml", "plan.yaml", "metrics.jsonl", "events.jsonl", "report.md", "run.json", "exit.json"} <= names
    assert [line[0] for line in numbers(whole)] == list(range(1, 9))
    assert sorted(path.name for path in (whole / "checkpoints").glob("step-*")) == ["step-00000006", "step-00000008"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (whole / "hf").iterdir()}
    found = read_exit(whole)
    assert found is not None and found.kind == "done"
    losses = [line[2] for line in numbers(whole)]
    assert losses[-1] < losses[0] - 0.3
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert {row["mfu"] for row in rows} == {None}  # a CPU has no peak to be compared with


def test_the_report_compares_what_was_measured(whole: Path) -> None:
    text = (whole / "report.md").read_text()
    assert "8 steps, 512 tokens" in text
    for row in ("memory: weights", "memory: moments", "memory per rank", "step time"):
        assert f"| {row} |" in text
    assert "bits per byte" in text and "Sample after training" in text


@pytest.mark.prove
def test_only_trained_weights_have_a_sample_before(root: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random ones write noise, for up to half of the time before the first step."""
    assert not (whole / "sample-before.txt").exists()
    assert "Sample before training" not in (whole / "report.md").read_text()
    drawn: list[int] = []

    def generate(*_: object, **__: object) -> list[int]:
        drawn.append(len(drawn))
        return [1]

    monkeypatch.setattr(sample, "generate", generate)
    train_here(recipe(root, "noise", train={"max_steps": 1}))
    assert drawn == [0]
    made = recipe(root, "onward", train={"max_steps": 1}, model={"path": str(whole / "hf"), "config": None})
    train_here(made)
    assert drawn == [0, 1, 2] and (directory(made) / "sample-before.txt").exists()
    assert "Sample before training" in (directory(made) / "report.md").read_text()


def test_validation_happens_when_asked_and_at_the_end(whole: Path) -> None:
    events = [json.loads(line) for line in (whole / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "validation"] == [4, 8]
    assert [event["step"] for event in events if event["event"] == "checkpoint committed"] == [3, 6, 8]


def test_the_exported_model_is_the_trained_one(whole: Path) -> None:
    """transformers loads hf/, tied, and its loss on the validation text is what the run reported (fp32: 1e-4)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(whole / "hf")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(whole / "hf")
    ids = torch.tensor([tokenizer("line 3 4 says 16").input_ids])
    with torch.no_grad():
        assert model(ids, labels=ids).loss < 5.5  # ln 320 is 5.77


def test_validation_and_samples_do_not_change_a_number(root: Path, whole: Path) -> None:
    made = recipe(root, "plain")
    train_here(made)
    assert numbers(directory(made)) == numbers(whole)
    assert weights_hash(directory(made)) == weights_hash(whole)


@pytest.mark.prove
def test_a_finished_run_that_is_started_again_keeps_its_report(root: Path, whole: Path) -> None:
    again = recipe(root, "again", evaluate={"eval_steps": 4})
    shutil.copytree(whole, directory(again))
    (directory(again) / "report.md").write_text("what was measured then")
    train_here(again)
    assert (directory(again) / "report.md").read_text() == "what was measured then"
    assert numbers(directory(again)) == numbers(whole)
    train_here(recipe(root, "again", evaluate={"eval_steps": 4}, train={"max_steps": 9}))
    assert "9 steps, 576 tokens" in (directory(again) / "report.md").read_text()


@pytest.mark.matrix
@pytest.mark.parametrize("step", [5, 2, 8])
def test_a_run_that_broke_ends_as_if_it_had_not(root: Path, whole: Path, step: int) -> None:
    made = recipe(root, f"broken-{step}")
    with pytest.raises(Broken):
        train_here(made, at(step, fail))
    found = read_exit(directory(made))
    assert found is not None and (found.kind, found.step, found.phase) == ("crash", step, "logging")
    train_here(made)
    assert numbers(directory(made)) == numbers(whole)
    assert weights_hash(directory(made)) == weights_hash(whole)


@pytest.mark.prove
def test_good_checkpoints_serve_whatever_else_is_damaged(
    root: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A byte of metrics.jsonl that is no UTF-8, a torn run.json, exit.json and event, a spoilt sample."""
    made = recipe(root, "damaged")
    with pytest.raises(Broken):
        train_here(made, at(5, fail))
    run = directory(made)
    before = json.loads((run / "run.json").read_text())
    for name in ("run.json", "exit.json", "events.jsonl"):
        (run / name).write_bytes((run / name).read_bytes()[:-9])
    (run / "sample-before.txt").write_bytes(b"\xff")
    metrics = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(metrics[0] + metrics[1].replace(b"loss", b"lo\xffs") + b"".join(metrics[2:]))
    train_here(made)
    said = capsys.readouterr().out
    assert refuses(said, "RUN006", "step-00000003", as_warning=True) and "remove" not in said
    assert refuses(said, "LOG001", "step 2", as_warning=True)
    after = json.loads((run / "run.json").read_text())
    assert after == before | {"created": after["created"]} and (run / "run.json.damaged").exists()
    assert numbers(run) == [line for line in numbers(whole) if line[0] != 2]
    assert weights_hash(run) == weights_hash(whole)
    found = read_exit(run)
    assert found is not None and found.kind == "done"


@pytest.mark.prove
def test_a_run_whose_identity_is_gone_goes_on_from_its_checkpoints(
    root: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a start with a damaged run.json and other data, which set that file aside and was refused."""
    made = recipe(root, "gone")
    with pytest.raises(Broken):
        train_here(made, at(5, fail))
    before = json.loads((directory(made) / "run.json").read_text())
    (directory(made) / "run.json").unlink()
    train_here(made)
    values = directory(made) / "run.json", "missing", "step-00000003"
    assert refuses(capsys.readouterr().out, "RUN006", *values, as_warning=True)
    after = json.loads((directory(made) / "run.json").read_text())
    assert after == before | {"created": after["created"]}
    assert numbers(directory(made)) == numbers(whole)


def test_a_damaged_identity_without_a_checkpoint_is_made_anew(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = recipe(root, "damaged-early", train={"max_steps": 2})
    with pytest.raises(Broken):
        train_here(made, at(1, fail))
    (directory(made) / "run.json").write_text('{"run_id": "')
    train_here(made)
    assert shows(capsys.readouterr().out, "no checkpoint", "starts over")


@pytest.mark.matrix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_within_a_step_and_stops(root: Path, whole: Path, number: signal.Signals) -> None:
    made = recipe(root, f"stopped-{number.name}")
    with pytest.raises(PreemptedError) as raised:
        train_here(made, at(4, lambda state: os.kill(os.getpid(), number)))
    assert raised.value.exit_code == 75
    assert refuses(str(raised.value), "STOP001", number.name, 5, 8)
    assert (directory(made) / "checkpoints" / "step-00000005" / "manifest.json").exists()
    found = read_exit(directory(made))
    assert found is not None and (found.kind, found.restartable) == ("preempted", True)
    train_here(made)
    assert numbers(directory(made)) == numbers(whole)
    assert weights_hash(directory(made)) == weights_hash(whole)


@pytest.mark.matrix
@pytest.mark.parametrize(("eval_steps", "step"), [(4, 4), (None, 8)])
def test_a_signal_stops_a_validation(
    root: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, eval_steps: int | None, step: int
) -> None:
    """The last one, or one between two steps: what was trained is saved, and a resumed run does the rest."""
    changes = {"evaluate": {"eval_steps": eval_steps, "max_batches": 6}}
    made = recipe(root, f"stopped-validation-{step}", **changes)
    true, seen = token_loss.score, []

    def score_and_ask(*args: Any, **given: Any) -> Any:
        seen.append(args)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return true(*args, **given)

    with monkeypatch.context() as patch:
        patch.setattr(token_loss, "score", score_and_ask)
        with pytest.raises(PreemptedError, match=refusal("STOP001", "SIGINT", step, 8)):
            train_here(made)
    assert len(seen) == 2
    found = read_exit(directory(made))
    assert found is not None and (found.kind, found.restartable) == ("preempted", True)
    assert (directory(made) / "checkpoints" / f"step-{step:08d}" / "manifest.json").exists()
    assert (directory(made) / "hf" / "config.json").exists() == (step == 8)
    train_here(made)
    events = [json.loads(line) for line in (directory(made) / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "validation"] == [8]
    assert numbers(directory(made)) == numbers(whole)
    assert weights_hash(directory(made)) == weights_hash(whole)


def test_a_run_does_not_go_back(whole: Path, tmp_path: Path) -> None:
    """Its epochs may say so only once the data are counted."""
    shutil.copytree(whole.parent.parent, tmp_path, dirs_exist_ok=True)
    with pytest.raises(DataError, match=r"CKPT024.*step 8,.* step 5"):
        train_here(recipe(tmp_path, "whole", train={"max_steps": 5}))


def test_numbers_that_stay_bad_stop_the_run_and_are_not_saved(root: Path) -> None:
    made = recipe(root, "poisoned", run={"max_skipped_steps": 1})

    def poison(state: TrainState) -> None:
        state.parameters()["norm.weight"].data.fill_(torch.nan)

    with pytest.raises(TrainingError) as raised:
        train_here(made, at(4, poison))
    [problem] = raised.value.problems
    assert problem.code == "NUM001" and problem.where.startswith("step 6, samples ")
    assert [path.name for path in (directory(made) / "checkpoints").glob("step-*")] == ["step-00000003"]
    assert [line[-1] for line in numbers(directory(made))] == [False] * 4 + [True] * 2


def test_a_poisoned_step_is_not_saved_even_when_it_is_the_turn_to_save(root: Path) -> None:
    made = recipe(root, "unsaved", run={"max_skipped_steps": 2})

    def poison(state: TrainState) -> None:
        state.parameters()["norm.weight"].data.fill_(torch.nan)

    with pytest.raises(TrainingError):
        train_here(made, at(5, poison))
    assert [path.name for path in (directory(made) / "checkpoints").glob("step-*")] == ["step-00000003"]


def kept_and_finite(run: Path) -> list[int]:
    """The steps of the checkpoints of ``run``, each of which has finite weights and moments only."""
    paths = sorted((run / "checkpoints").glob("step-*"))
    for path in paths:
        tensors = [tensor for part in path.glob("**/*.safetensors") for tensor in load_file(part).values()]
        assert tensors and all(tensor.isfinite().all() for tensor in tensors), path
    return [int(path.name[5:]) for path in paths]


@pytest.mark.parametrize("compute", ["fp16", "fp32"])
def test_a_run_that_diverges_loses_no_good_checkpoint(root: Path, compute: str) -> None:
    """Each step is saved, and the weights of the first bad update too would be: a loss that is not finite comes a step
    later. No loss scale is searched for, and what is kept goes on."""
    changes: dict[str, Any] = {"precision": {"compute": compute}, "checkpoint": {"save_steps": 1}}
    made = recipe(root, f"diverges-{compute}", train={"max_steps": 4}, **changes)
    planned = replace(small_run.plan(), precision=Precision(compute=compute))  # type: ignore[arg-type]
    train(made, planned)
    wild = {"learning_rate": 30.0 if compute == "fp16" else 1e30, "warmup_steps": 0}
    with pytest.raises(TrainingError) as raised:
        train(recipe(root, f"diverges-{compute}", train={"max_steps": 20}, optim=wild, **changes), planned)
    [problem] = raised.value.problems
    steps = kept_and_finite(directory(made))
    assert problem.code == "NUM001" and f"step-{steps[-1]:08d}" in problem.fix and 4 <= steps[-1] < 10
    lines = [json.loads(line) for line in (directory(made) / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines[-5:]] == [False] + [True] * 4 and lines[-5]["step"] == steps[-1] + 1
    train(recipe(root, f"diverges-{compute}", train={"max_steps": steps[-1] + 1}, **changes), planned)
    again = [json.loads(line) for line in (directory(made) / "metrics.jsonl").read_text().splitlines()]
    assert again[-1]["loss"] is not None and kept_and_finite(directory(made))[-1] == steps[-1] + 1


@pytest.mark.parametrize("stopped", [False, True])
def test_what_the_last_step_has_spoilt_is_neither_saved_nor_exported(root: Path, stopped: bool) -> None:
    """No further step shows it."""

    def spoil(state: TrainState) -> None:
        state.parameters()["norm.weight"].data.fill_(torch.inf)
        if stopped:
            os.kill(os.getpid(), signal.SIGTERM)

    made = recipe(root, f"spoilt-{stopped}", train={"max_steps": 9 if stopped else 2}, checkpoint={"save_steps": 9})
    with pytest.raises(PreemptedError if stopped else TrainingError) as raised:
        train_here(made, at(2, spoil))
    assert raised.value.problems[0].code == ("STOP001" if stopped else "NUM001")
    assert "checkpoints/step" not in str(raised.value) and kept_and_finite(directory(made)) == []
    assert not (directory(made) / "hf").exists() and (stopped or read_exit(directory(made)).kind == "error")


def test_a_last_step_that_is_skipped_costs_its_update_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are those of the step before, which are good."""
    true = pretrain.finish

    def finish(*args: Any, **given: Any) -> Any:
        loss = true(*args, **given)
        return loss._replace(value=loss.value * torch.nan) if spoilt else loss

    spoilt: list[int] = []
    monkeypatch.setattr(pretrain, "finish", finish)

    def now(state: TrainState, stats: StepStats) -> None:
        spoilt[:] = [1] * (state.step == 2)

    train_here(made := recipe(root, "last-skipped", train={"max_steps": 3}), (now,))
    assert kept_and_finite(directory(made)) == [3] and numbers(directory(made))[-1][-1]


def test_other_data_are_not_taken_for_the_same_run(root: Path, tmp_path: Path) -> None:
    made = recipe(root, "data")
    with pytest.raises(Broken):
        train_here(made, at(1, fail))
    shutil.copytree(root / "text", tmp_path / "text")
    (tmp_path / "text" / "0.txt").write_text("something else entirely\n" * 50)
    with pytest.raises(DataError) as raised:
        train_here(recipe(root, "data", data={"path": str(tmp_path / "text")}))
    assert raised.value.problems[0].code == "DATA013"


def test_no_memory_is_explained_by_category(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.runtime import fit

    def dear(*_: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(fit, "accumulate", dear)
    with pytest.raises(TrainingError) as raised:
        train_here(recipe(root, "large"))
    [problem] = raised.value.problems
    assert problem.code == "MEM001"
    assert "longest batch" in problem.what
    assert "train.micro_batch_size=2" in problem.fix and "recompute.mode=full" in problem.fix
    found = read_exit(directory(recipe(root, "large")))
    assert found is not None and found.kind == "memory"


def test_nothing_that_only_reports_ends_a_run(
    root: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples, the count of operations, the measurements of two steps, a profile, report.md and the summary:
    each fails, and says so; the numbers and the model are those of a run in which nothing did."""

    def broken(what: str) -> Any:
        def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError(f"{what} is broken")

        return fail

    monkeypatch.setattr(begin, "begins_trained", lambda recipe: True)
    monkeypatch.setattr(sample, "generate", broken("generate"))
    monkeypatch.setattr(begin, "flops_per_token", broken("the count"))
    monkeypatch.setattr(measure, "by_axis", broken("the traffic"))
    monkeypatch.setattr(measure, "highest_bytes", broken("the memory"))
    monkeypatch.setattr(profile.Profile, "_start", broken("the profiler"))
    monkeypatch.setattr(Report, "markdown", broken("the report"))
    monkeypatch.setattr(end, "closing_lines", broken("the summary"))
    made = recipe(root, "unreported", run={"profile_steps": "5:6"}, evaluate={"eval_steps": 4})
    train_here(made)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning[REP001]: ")]
    failed = [
        ("sample at step 0", "generate"),
        ("peak speed", "count"),
        ("traffic", "traffic"),
        ("memory", "memory"),
        ("profile", "profiler"),
        ("profile", "profiler"),
        ("sample at step 8", "generate"),
        ("report.md", "report"),
        ("summary", "summary"),
    ]
    assert len(said) == len(failed)
    for line, (what, why) in zip(said, failed, strict=True):
        assert refuses(line, "REP001", what, why, "broken", as_warning=True)
    assert numbers(directory(made)) == numbers(whole)
    assert weights_hash(directory(made)) == weights_hash(whole)


def test_fp16_that_overflows_has_no_sample_and_is_trained(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Logits beyond 65,504 are infinite in fp16: no token can be drawn of them. (Weights that give such logits for a
    batch that was trained on are not exported.)"""
    half = replace(small_run.plan(), precision=Precision("fp16"))
    made = recipe(root, "overflow", train={"max_steps": 3})
    write = loop.write_model

    def enlarge(job: Job, state: TrainState, log: Log) -> None:
        write(job, state, log)
        state.parameters()["norm.weight"].data.fill_(1e6)

    monkeypatch.setattr(loop, "write_model", enlarge)
    train(made, half)
    said = capsys.readouterr().out
    assert shows(said, "sample at step 3", "error[NUM002]")
    assert (directory(made) / "hf" / "model.safetensors").exists() and (directory(made) / "report.md").exists()
