"""Pairs of answers from end to end: a tiny model learns which is preferred; a kill changes nothing; the reference is
the model as it came, whatever has been trained since."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.app import main
from shardwise.data import tokens
from shardwise.models import hf, init
from shardwise.models.config import from_hf, parameter_shapes
from shardwise.models.tensorfile import entries
from tests.runtime.small_run import MODEL
from tests.said import refuses, shows

NUMBERS = ("step", "loss", "grad_norm", "learning_rate", "pairs", "skipped")


def write_model(seed: int) -> None:
    spec = from_hf(MODEL, "tiny")
    shapes = parameter_shapes(spec)
    wholes = {name: tuple(slice(0, size) for size in shape) for name, shape in shapes.items()}
    hf.write_weights(Path("model"), spec, lambda name: init.fill(name, shapes[name], wholes[name], seed, spec))


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whatever is asked, the polite answer is preferred."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("PYTHONPATH", str(Path(__file__).resolve().parents[2] / "src")), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)
    records = [
        {"prompt": f"what is {i} and {i * i % 17}? ", "chosen": f"please, {i % 7}", "rejected": f"no idea, {i % 5}"}
        for i in range(120)
    ]
    Path("pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_model(0)
    tokens.train_tokenizer([json.dumps(record) for record in records], 320, Path("model"))
    settings = "model.path=model method=dpo method.beta=0.5 data.path=pairs.jsonl data.cache=cache train.seq_len=96"
    more = "data.validation_share=0.2 train.global_batch_size=4 optim.learning_rate=2e-3 optim.schedule=constant"
    last = "evaluate.eval_steps=4 precision.compute=fp32 run.timeout_s=60 run.device=cpu train.max_steps=8"
    saved = [
        "evaluate.max_batches=50",
        "checkpoint.save_steps=3",
        "checkpoint.asynchronous=false",
    ]  # there when a rank is killed soon after
    return ["train", *settings.split(), *more.split(), *last.split(), *saved]


def rows(run: str) -> list[tuple[Any, ...]]:
    lines = Path(f"runs/{run}/metrics.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)[key] for key in NUMBERS) for line in lines]


def validations(run: str) -> list[dict[str, Any]]:
    lines = map(json.loads, Path(f"runs/{run}/events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "validation"]


def reference(run: str) -> Path:
    (found,) = Path(f"runs/{run}").glob("reference-*.safetensors")
    return found


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_two_ranks_learn_and_a_kill_changes_nothing(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = ["parallel.strategy=zero3", "--nproc", "2"]
    assert main([*words, *ranks, "--run", "straight"]) == 0, capfd.readouterr()
    straight = rows("straight")
    assert abs(straight[0][1] - math.log(2)) < 1e-5 and straight[-1][1] < 0.5
    first, last = validations("straight")
    assert last["loss"] < first["loss"] < math.log(2) and last["accuracy"] >= first["accuracy"] > 0.5
    assert last["reward_margin"] > first["reward_margin"] > 0
    said = capfd.readouterr().out
    assert shows(said, "mean", "the pairs") and f"validation loss {last['loss']:.4f}, accuracy" in said

    monkeypatch.setenv("SHARDWISE_FAULT", "forward:6:1")
    assert main([*words, *ranks, "--run", "killed"]) != 0
    monkeypatch.delenv("SHARDWISE_FAULT")
    assert len(rows("killed")) < 8
    kept = reference("killed")
    before = kept.read_bytes(), kept.stat().st_mtime_ns
    assert main(["train", "--resume", "runs/killed"]) == 0
    assert rows("killed") == straight and validations("killed")[-1]["loss"] == last["loss"]
    assert (kept.read_bytes(), kept.stat().st_mtime_ns) == before
    assert "pairs scored" not in capfd.readouterr().out.partition("resumed at step")[2]
    assert kept.read_bytes() == reference("straight").read_bytes()

    assert main(["compare", "runs/straight", "runs/killed", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["runs"][0]["last_validation"] == {"step": 8, "loss": last["loss"]}
    kept.rename("elsewhere")
    assert main(["train", "--resume", "runs/killed", "--max-steps", "9"]) == 65
    assert refuses(capfd.readouterr().err, "DPO001", kept.name)
    Path("elsewhere").rename(kept)
    write_model(1)
    assert main(["train", "--resume", "runs/killed", "--max-steps", "9"]) == 65
    assert refuses(capfd.readouterr().err, "DPO001", "began with other")


@pytest.mark.prove
@pytest.mark.timeout(240)
def test_the_reference_has_the_adapters_that_a_run_begins_with(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    adapters = ["lora.rank=2", "--nproc", "1", "optim.learning_rate=2e-2"]
    assert main([*words, *adapters, "--run", "a"]) == 0, capfd.readouterr()
    assert main([*words, *adapters, "--run", "b", "lora.path=runs/a/adapter", "--max-steps", "8"]) == 0
    one, two = ({name: entry.read() for name, entry in entries(reference(run)).items()} for run in "ab")
    assert one.keys() == two.keys() == {"train", "validation"}
    assert all((one[name][:, 0] < two[name][:, 0]).any() for name in one), "the first run has changed the model"
    for run in "ab":
        first, *_, last = map(json.loads, Path(f"runs/{run}/metrics.jsonl").read_text().splitlines())
        assert abs(first["loss"] - math.log(2)) < 1e-5 and first["rewards/chosen"] == pytest.approx(0, abs=1e-5)
        assert last["rewards/margins"] > 0.1 and last["rewards/accuracies"] > 0.5
    assert Path("runs/b/adapter/adapter_config.json").is_file()


def test_what_is_no_preference_is_refused_before_anything_starts(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    Path("talks.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    assert main([*words, "--run", "a", "data.path=talks.jsonl"]) == 65
    assert "error[DATA005]: talks.jsonl:1 has no `chosen`" in capfd.readouterr().err
    assert not Path("runs/a").exists()
    assert main([*words, "--run", "a", "method=sft"]) == 78
    assert "`method.beta` is for `method: dpo`" in capfd.readouterr().err
    assert main([*words, "--run", "a", "method=sft", "method.beta=0.1"]) == 65
    assert "error[DATA005]: pairs.jsonl:1 " in capfd.readouterr().err
