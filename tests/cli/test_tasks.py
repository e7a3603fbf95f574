"""Tasks from end to end: what the files of a run hold is what transformers writes with the exported model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwise.cli.app import main
from shardwise.data import tokens
from shardwise.models import hf, init
from shardwise.models.config import from_hf, parameter_shapes
from tests.cli.test_chat_run import MODEL
from tests.said import refuses

PROMPTS = [{"prompt": f"the colour of {i} is ", "answer": ("red", "green", "blue")[i % 3]} for i in range(6)]
MINE = "def score(answer, expected):\n    return float(answer[:1] == expected[:1])\n"
TOKENS = 6


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A few answers to be learnt by heart, which the tasks ask for again."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("PYTHONPATH", str(Path(__file__).resolve().parents[2] / "src")), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)
    records = [json.dumps({"prompt": each["prompt"], "completion": each["answer"]}) + "\n" for each in PROMPTS]
    Path("train.jsonl").write_text("".join(records * 4))
    Path("prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in PROMPTS))
    Path("mine.py").write_text(MINE)
    spec = from_hf(MODEL, "tiny")
    shapes = parameter_shapes(spec)
    wholes = {name: tuple(slice(0, size) for size in shape) for name, shape in shapes.items()}
    hf.write_weights(Path("model"), spec, lambda name: init.fill(name, shapes[name], wholes[name], 0, spec))
    tokens.train_tokenizer(records * 50, 400, Path("model"))
    task = {"path": "prompts.jsonl", "samples": 4, "max_new_tokens": TOKENS}
    tasks = [{"name": "exact", **task}, {"name": "first-letter", "score": "mine.py:score", **task}]
    recipe: dict[str, Any] = {
        "model": {"path": "model"},
        "method": {"name": "sft"},
        "data": {"path": "train.jsonl", "validation_share": 0.0, "cache": "cache"},
        "train": {"seq_len": 64, "global_batch_size": 2, "max_steps": 20},
        "optim": {"learning_rate": 1e-2, "schedule": "constant"},
        "precision": {"compute": "fp32"},
        "run": {"device": "cpu"},
        "evaluate": {"eval_steps": 10, "tasks": tasks},
    }
    Path("recipe.yaml").write_text(json.dumps(recipe))
    return ["train", "recipe.yaml"]


def answers(run: str, task: str, step: int) -> list[dict[str, Any]]:
    lines = Path(f"runs/{run}/answers/{task}/step-{step:08d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def by_transformers(run: str) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(f"runs/{run}/hf")
    model = AutoModelForCausalLM.from_pretrained(f"runs/{run}/hf")
    found = []
    for each in PROMPTS[:4]:
        ids = tokenizer(each["prompt"], return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            mask = torch.ones_like(ids)
            written = model.generate(ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False)
        found.append(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True).strip())
    return found


def holds(run: str) -> None:
    """Files, events and report of a run of 20 steps."""
    last = answers(run, "exact", 20)
    assert [line["answer"] for line in last] == by_transformers(run)
    assert [(line["prompt"], line["expected"]) for line in last] == [(e["prompt"], e["answer"]) for e in PROMPTS[:4]]
    assert [line["score"] for line in last] == [float(line["answer"] == line["expected"]) for line in last]
    own = answers(run, "first-letter", 20)
    assert [line["score"] for line in own] == [float(line["answer"][:1] == line["expected"][:1]) for line in own]
    events = map(json.loads, Path(f"runs/{run}/events.jsonl").read_text().splitlines())
    scores = {(line["task"], line["step"]): line["score"] for line in events if line["event"] == "task"}
    assert set(scores) == {(task, step) for task in ("exact", "first-letter") for step in (10, 20)}
    assert scores["exact", 20] == sum(line["score"] for line in last) / 4
    report = Path(f"runs/{run}/report.md").read_text()
    for step in (10, 20):
        shown = [" ".join(line["answer"].split()) for line in answers(run, "exact", step)[:3]]
        assert f"| {step} | {scores['exact', step]:.3f} | {' | '.join(shown)} |" in report


@pytest.mark.prove
@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "strategy=zero3"])
def test_answers_under_layouts(words: list[str], capfd: pytest.CaptureFixture[str], layout: str) -> None:
    assert main([*words, "--run", "two", "--nproc", "2", f"parallel.{layout}"]) == 0, capfd.readouterr()
    holds("two")


@pytest.mark.prove
def test_answers_are_kept_and_scored(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--run", "one", "--nproc", "1"]) == 0, capfd.readouterr()
    holds("one")
    said = capfd.readouterr().out
    assert "step 20: exact " in said and "runs/one/answers/exact/step-00000020.jsonl" in said


def test_a_wrong_task_is_refused_before_anything_starts(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("def other(): ...\n")
    assert main([*words, "--run", "one"]) == 65
    assert refuses(capfd.readouterr().err, "EVAL001", "`score`")
    assert not Path("runs/one").exists()
