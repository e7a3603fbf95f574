"""Conversations from end to end: a tiny model is tuned on some of those that ship, and answers in their style."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwise.cli.app import main
from shardwise.data import tokens
from shardwise.data.source import find
from shardwise.models import hf, init
from shardwise.models.config import from_hf, parameter_shapes
from shardwise.runtime.loop import train
from shardwise.spec.plan import Batch, Lora, Plan
from shardwise.spec.recipe import Recipe
from tests.said import shows

SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
MODEL = {"model_type": "llama", "vocab_size": 400, "tie_word_embeddings": True, **SIZE}
QUESTION = "What does len do?"


@pytest.fixture
def talks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """20 of the conversations, a tokenizer of their text, and untrained weights in ``model``."""
    monkeypatch.chdir(tmp_path)
    (source,) = find("python-chat")
    lines = source.path.read_text(encoding="utf-8").splitlines(keepends=True)[:20]
    Path("talks.jsonl").write_text("".join(lines), encoding="utf-8")
    spec = from_hf(MODEL, "tiny")
    shapes = parameter_shapes(spec)
    wholes = {name: tuple(slice(0, size) for size in shape) for name, shape in shapes.items()}
    hf.write_weights(Path("model"), spec, lambda name: init.fill(name, shapes[name], wholes[name], 0, spec))
    tokens.train_tokenizer(lines, 400, Path("model"))
    return lines


def tuned(name: str, steps: int, lora: Lora | None = None) -> Recipe:
    """The recipe of a run on the conversations."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": name, "device": "cpu", "timeout_s": 60.0},
        "model": {"path": "model"},
        "method": {"name": "sft"},
        "data": {"path": "talks.jsonl", "chat_template": "zephyr", "validation_share": 0.0, "cache": "cache"},
        "train": {"seq_len": 128, "max_steps": steps},
        "optim": {"learning_rate": 1e-2, "schedule": "constant"},
        "lora": {"rank": lora.rank if lora else None},
    }
    return Recipe.model_validate(sections)


def tune(name: str, steps: int, lora: Lora | None = None) -> None:
    """In this process. The tests of the runtime have more ranks."""
    train(tuned(name, steps, lora), Plan(batch=Batch(4, 1, 128), lora=lora))


@pytest.mark.prove
def test_a_tiny_model_learns_the_style(talks: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The answer is what transformers writes after the template that went with the tokenizer."""
    tune("full", 60)
    losses = [json.loads(line)["loss"] for line in Path("runs/full/metrics.jsonl").read_text().splitlines()]
    assert losses[0] > 5.5  # ln 400 is 6.0
    assert sum(losses[-5:]) / 5 < 0.65 * losses[0]  # 0.53 when this was written
    capsys.readouterr()
    assert main(["generate", "runs/full", "--chat", "--prompt", QUESTION, "--tokens", "40"]) == 0
    said = capsys.readouterr().out.strip()
    assert said.startswith("In Python, ")
    theirs = AutoTokenizer.from_pretrained("runs/full/hf")
    turn = [{"role": "user", "content": QUESTION}]
    ids = theirs.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    with torch.no_grad():
        written = AutoModelForCausalLM.from_pretrained("runs/full/hf").generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=theirs.eos_token_id,
        )
    assert said == theirs.decode(written[0, ids.shape[1] :], skip_special_tokens=True).strip()


def test_epochs_are_samples_and_tokens_are_no_padding(talks: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Three epochs of the conversations, one a window: what is read, and trained on, is what transformers encodes."""
    recipe = tuned("counted", 1)
    few = recipe.train.model_copy(update={"max_steps": None, "num_epochs": 3.0, "seq_len": 256})
    data = recipe.data.model_copy(update={"packing": False, "too_long": "error"})
    report = train(recipe.model_copy(update={"train": few, "data": data}), Plan(batch=Batch(8, 1, 256)))
    lines = [json.loads(line) for line in Path("runs/counted/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))  # 60 samples, 8 a step, of which the last has 4
    theirs = AutoTokenizer.from_pretrained("runs/counted/tokenizer")
    read = supervised = 0
    for line in talks:
        found = json.loads(line)["messages"]
        ids = [theirs.apply_chat_template(found[:k], return_dict=False) for k in range(1, len(found) + 1)]
        read += len(ids[-1])
        for k in (k for k, message in enumerate(found) if message["role"] == "assistant"):
            asked = theirs.apply_chat_template(found[:k], add_generation_prompt=True, return_dict=False)
            supervised += len(ids[k]) - len(asked) - 1  # all but the line end after it
    shown = {key: sum(line[key] for line in lines) for key in ("read_tokens", "supervised_tokens")}
    assert shown == {"read_tokens": 3 * read, "supervised_tokens": 3 * supervised}
    assert lines[-1]["tokens"] == 3 * read == report.tokens
    for line in lines:
        assert line["padding"] == pytest.approx(1 - line["read_tokens"] / 2048, abs=1e-4)
        assert line["tokens_per_s"] == pytest.approx(line["read_tokens"] / line["seconds"], rel=1e-2)
    room = 8 * 2048 - 3 * read
    values = "8 steps", f"{3 * read:,} tokens", f"{3 * supervised:,} supervised", f"{room:,} more"
    assert shows(Path("runs/counted/report.md").read_text(), *values)


def test_adapters_answer_and_are_exported(talks: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """From the checkpoint, then merged: the template goes along."""
    tune("adapters", 3, Lora(rank=2, alpha=4.0))
    capsys.readouterr()
    words = ["--chat", "--prompt", QUESTION, "--tokens", "8", "--json"]
    assert main(["generate", "runs/adapters", *words]) == 0
    before = json.loads(capsys.readouterr().out)
    assert before["prompt"] == QUESTION and not before["text"].startswith("<|")
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert Path("runs/adapters/adapter", name).read_bytes() == Path("runs/adapters/tokenizer", name).read_bytes()
    assert main(["export", "runs/adapters"]) == 0
    said = capsys.readouterr().out
    assert "14 adapters merged" in said and "serve    vllm serve runs/adapters/hf\n" in said
    assert "<|assistant|>" in Path("runs/adapters/hf/chat_template.jinja").read_text()
    assert main(["generate", "runs/adapters", *words]) == 0
    assert json.loads(capsys.readouterr().out) == before
    assert main(["export", "runs/adapters", "--dtype", "bf16", "--out", "narrow"]) == 0
    wide, narrow = (AutoModelForCausalLM.from_pretrained(path, dtype="auto") for path in ("runs/adapters/hf", "narrow"))
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    for name, value in wide.state_dict().items():
        assert torch.equal(narrow.state_dict()[name], value.bfloat16()), name


def test_what_cannot_chat_is_refused(talks: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "model", "--chat", "--prompt", QUESTION]) == 65
    said = capsys.readouterr().err
    assert "error[CHAT001]: " in said and "data.chat_template=zephyr" in said
    assert main(["generate", "model", "--chat"]) == 2
    assert "error[CLI001]: --chat " in capsys.readouterr().err
    Path("model/chat_template.jinja").write_text("{{ raise_exception('no users') }}")
    assert main(["generate", "model", "--chat", "--prompt", QUESTION, "--json"]) == 65
    assert json.loads(capsys.readouterr().out)["error"]["problems"][0]["code"] == "CHAT002"


WORDS = [
    "model.path=model",
    "data.path=talks.jsonl",
    "data.chat_template=zephyr",
    "data.validation_share=0",
    "data.cache=cache",
    "method=sft",
    "train.seq_len=128",
    "train.global_batch_size=4",
    "train.max_steps=3",
    "train.num_epochs=null",
    "run.timeout_s=60",
    "precision.compute=fp32",
    "optim.learning_rate=0.01",
    "evaluate.sample_prompt=In",
]


@pytest.mark.prove
@pytest.mark.parametrize("setting", ["parallel.tp=2", "parallel.strategy=zero3", "lora.rank=2"])
def test_a_run_of_any_layout_answers_in_one_process(
    talks: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """From the checkpoint that two ranks wrote, or their adapter, what transformers writes with the exported model."""
    assert main(["train", *WORDS, setting, "--nproc", "2", "--run", "two"]) == 0
    lora = setting.startswith("lora")
    directory = Path("runs/two")
    if not lora:
        (directory / "hf").rename("exported")
    monkeypatch.setattr("sys.stdin", io.StringIO(QUESTION))
    capfd.readouterr()
    assert main(["chat", str(directory / "adapter" if lora else directory), "--tokens", "12", "--json"]) == 0
    turns = json.loads(capfd.readouterr().out)["messages"]
    if lora:
        assert main(["export", "runs/two", "--out", "exported"]) == 0
    theirs = AutoTokenizer.from_pretrained("exported")
    ids = theirs.apply_chat_template(turns[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    network = AutoModelForCausalLM.from_pretrained("exported")
    written = network.generate(**ids, max_new_tokens=12, do_sample=False, eos_token_id=theirs.eos_token_id)
    answer = theirs.decode(written[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    assert turns == [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]
