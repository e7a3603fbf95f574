"""The main thing from end to end: two ranks train a tiny model; the run can be generated from, exported and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.app import main

TINY = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS = [f"model.config.{key}={value}" for key, value in TINY.items()]
WORDS += ["model.config.num_key_value_heads=1", "data.path=text", "data.cache=cache", "data.tokenizer.vocab_size=300"]
WORDS += ["train.seq_len=32", "train.global_batch_size=4", "data.repeat=true", "checkpoint.save_steps=2"]


@pytest.mark.prove
@pytest.mark.launched
@pytest.mark.timeout(240)
def test_train_generate_export_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = str(Path(__file__).resolve().parents[2] / "src")
    for name, value in (("PYTHONPATH", source), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    Path("text").mkdir()
    for number in range(30):
        Path(f"text/{number}.txt").write_text(f"def f{number}(x):\n    return x + {number}\n" * 30)
    assert main(["train", *WORDS, "--run", "a", "--nproc", "2", "--max-steps", "3", "--json"]) == 0, capfd.readouterr()
    assert json.loads(capfd.readouterr().out) == {"run": "runs/a", "exit_code": 0}
    lines = [json.loads(line) for line in Path("runs/a/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for name in (
        "recipe.yaml",
        "plan.yaml",
        "report.md",
        "report.html",
        "run.json",
        "hf/config.json",
        "checkpoints/step-00000003",
    ):
        assert (Path("runs/a") / name).exists(), name

    assert main(["generate", "runs/a", "--prompt", "def ", "--tokens", "4", "--json"]) == 0
    exported = json.loads(capfd.readouterr().out)
    assert exported["prompt"] == "def " and exported["text"]

    assert main(["export", "runs/a", "-o", "model", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"directory": "model", "pushed": None}
    assert main(["generate", "model", "--prompt", "def ", "--tokens", "4", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == exported

    assert main(["train", "--resume", "runs/a", "--max-steps", "4", "--json"]) == 0
    lines = [json.loads(line) for line in Path("runs/a/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
