"""Streamed data from end to end: two ranks, one of them killed in the third portion; and no more than three portions on
the disk at any time."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from shardwise.cli.app import main
from tests.said import shows

MODEL = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
MODEL |= {"num_attention_heads": 2, "num_key_value_heads": 1}
WORDS = [f"model.config.{key}={value}" for key, value in MODEL.items()]
WORDS += ["data.path=text", "data.cache=cache", "data.tokenizer.vocab_size=300", "data.num_proc=1"]
WORDS += ["data.streaming=true", "data.streaming_bytes=2k", "optim.warmup_steps=2", "--nproc", "2"]
WORDS += ["train.seq_len=32", "train.global_batch_size=4", "train.max_steps=36", "checkpoint.save_steps=3"]
WORDS += ["checkpoint.asynchronous=false"]
KEYS = ("step", "tokens", "loss", "grad_norm", "learning_rate", "supervised_tokens", "skipped")
KILL = 20


def numbers(run: Path) -> list[tuple[object, ...]]:
    """Of each line of metrics.jsonl, what must not depend on interruptions."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)[key] for key in KEYS) for line in lines]


@contextmanager
def watched(stream: Path) -> Iterator[list[int]]:
    """How many directories of portions were seen there at once, those in preparation too."""
    seen, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            seen.append(len([path for path in stream.glob("*portion-*") if path.is_dir()]))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


@pytest.mark.prove
@pytest.mark.timeout(400)
def test_a_run_on_streamed_data_killed_in_the_third_portion_equals_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2] / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    Path("text").mkdir()
    for number in range(30):
        chance = Random(number)
        lines = [f"def f{number}_{n}(x): return x + {chance.randrange(99)}\n" for n in range(12)]
        Path(f"text/{number}.txt").write_text("".join(lines))

    assert main(["train", *WORDS, "--run", "whole"]) == 0, capfd.readouterr()
    said = capfd.readouterr().out
    assert shows(said, "data", "5 portions")
    visits = json.loads(Path("runs/whole/stream/stream.json").read_text())["visits"]
    ends = [sum(count for count, _ in visits[: number + 1]) for number in range(len(visits))]
    assert ends[1] < KILL * 4 - 8 < KILL * 4 < ends[2] and ends[-1] >= 36 * 4, ends

    monkeypatch.setenv("SHARDWISE_FAULT", f"forward:{KILL}:1")
    with watched(Path("runs/killed/stream")) as seen:
        assert main(["train", *WORDS, "--run", "killed"]) == 1
        assert main(["generate", "runs/killed", "--prompt", "def ", "--tokens", "4", "--json"]) == 0
        assert main(["train", "--resume", "runs/killed"]) == 0, capfd.readouterr()
    assert 2 <= max(seen) <= 3
    told = capfd.readouterr()
    assert f"resumed at step {KILL - 2}" in told.out
    assert [line[0] for line in numbers(Path("runs/killed"))] == list(range(1, 37))
    assert numbers(Path("runs/killed")) == numbers(Path("runs/whole"))
    assert json.loads(Path("runs/killed/stream/stream.json").read_text())["visits"] == visits
    weights = [Path(f"runs/{name}/hf/model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]
