"""What a model writes after the prompts of a file, beside what it writes after each alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.app import main
from shardwise.data import tokens
from shardwise.data.template import SHIPPED
from shardwise.models import hf, init
from shardwise.models.config import from_hf, parameter_shapes

SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
MODEL = {"model_type": "llama", "vocab_size": 300, "max_position_embeddings": 256, **SIZE}
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "one", "id": 7},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a list?" * 3}]},
    {"prompt": "two words and more than the others have, é"},
    {"prompt": [{"role": "user", "content": "Hi"}]},
]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of random weights, with a tokenizer and a chat template."""
    monkeypatch.chdir(tmp_path)
    spec = from_hf(MODEL, "tiny")
    shapes = parameter_shapes(spec)
    wholes = {name: tuple(slice(0, size) for size in shape) for name, shape in shapes.items()}
    hf.write_weights(
        Path("model"), spec, lambda name: 8 * init.fill(name, shapes[name], wholes[name], 0, spec).double()
    )
    tokens.train_tokenizer(["one two three words", "é"], 300, Path("model"))
    Path("model/chat_template.jinja").write_text(SHIPPED["zephyr"])
    return Path("model")


def said(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    capfd.readouterr()
    assert main(["generate", "model", *words, "--tokens", "6"]) == 0
    return capfd.readouterr().out


@pytest.mark.parametrize("draws", [[], ["--temperature", "1.2", "--top-k", "50", "--top-p", "0.95", "--seed", "3"]])
def test_a_file_is_answered_as_each_of_its_prompts(
    model: Path, capfd: pytest.CaptureFixture[str], draws: list[str]
) -> None:
    """In batches and in two processes, in the order of the file; keys that a record has besides are kept."""
    Path("prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    words = ["--file", "prompts.jsonl", *draws]
    lines = [json.loads(line) for line in said(capfd, *words).splitlines()]
    assert [{**line, "text": None} for line in lines] == [{**prompt, "text": None} for prompt in PROMPTS]
    for at in (0, 2):
        alone = said(capfd, "--prompt", PROMPTS[at]["prompt"], "--json", *draws)
        assert json.loads(alone)["text"] == lines[at]["text"] != ""
    assert said(capfd, "--chat", "Hi", *draws).strip() == lines[3]["text"]
    assert (
        said(capfd, *words, "--nproc", "2", "--out", "answers.jsonl", "--batch-size", "1") == "written: answers.jsonl\n"
    )
    assert [json.loads(line) for line in Path("answers.jsonl").read_text("utf-8").splitlines()] == lines


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ('{"prompt": 1', "DATA004", "prompts.jsonl:2"),
        ("[]", "DATA005", "prompts.jsonl:2"),
        ('{"text": "x"}', "DATA005", "prompts.jsonl:2"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "DATA005", "nothing is left to answer"),
        ('{"messages": [{"role": "user"}]}', "DATA005", "`messages[0].content` is not a string"),
    ],
)
def test_a_line_that_asks_nothing_is_named(
    model: Path, capsys: pytest.CaptureFixture[str], line: str, code: str, told: str
) -> None:
    Path("prompts.jsonl").write_text('{"prompt": "fine"}\n' + line + "\n")
    assert main(["generate", "model", "--file", "prompts.jsonl"]) == 65
    err = capsys.readouterr().err
    assert f"error[{code}]" in err and told in err


def test_what_a_file_of_prompts_does_not_go_with(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("prompts.jsonl").write_text('{"prompt": "fine"}\n')
    assert main(["generate", "model", "--file", "prompts.jsonl", "--out", "prompts.jsonl"]) == 73
    assert "nothing is overwritten" in capsys.readouterr().err
    assert main(["generate", "model", "words", "--file", "prompts.jsonl"]) == 2
    assert main(["generate", "model", "words", "--out", "x"]) == 2
    assert main(["generate", "model", "--file", "none.jsonl"]) == 66
    assert "error[DATA001]" in capsys.readouterr().err
