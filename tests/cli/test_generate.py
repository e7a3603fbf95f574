"""What a model writes after the prompts of a file, beside what it writes after each alone."""

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
    """In batches of any size, in the order of the file; keys that a record has besides are kept."""
    Path("prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    words = ["--file", "prompts.jsonl", *draws]
    lines = [json.loads(line) for line in said(capfd, *words).splitlines()]
    assert [{**line, "text": None} for line in lines] == [{**prompt, "text": None} for prompt in PROMPTS]
    for at in (0, 2):
        alone = said(capfd, "--prompt", PROMPTS[at]["prompt"], "--json", *draws)
        assert json.loads(alone)["text"] == lines[at]["text"] != ""
    assert said(capfd, "--chat", "Hi", *draws).strip() == lines[3]["text"]
    assert said(capfd, *words, "--out", "answers.jsonl", "--batch-size", "1") == "written: answers.jsonl\n"
    assert [json.loads(line) for line in Path("answers.jsonl").read_text("utf-8").splitlines()] == lines


@pytest.mark.prove
def test_a_file_is_shared_by_processes(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    alone = said(capfd, "--file", "prompts.jsonl")
    assert said(capfd, "--file", "prompts.jsonl", "--nproc", "3") == alone


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ('{"prompt": 1', "DATA004", "prompts.jsonl:2"),
        ("[]", "DATA005", "prompts.jsonl:2"),
        ('{"text": "x"}', "DATA005", "prompts.jsonl:2"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "DATA005", "nothing is left"),
        ('{"messages": [{"role": "user"}]}', "DATA005", "`messages[0].content`"),
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


def talk(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lines: list[str], *words: str
) -> list[str]:
    """What `chat` prints, of lines that are piped in."""
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    capfd.readouterr()
    assert main(["chat", "model", "--tokens", "6", *words]) == 0
    return capfd.readouterr().out.split("\n")


TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def written_by_transformers(turns: list[dict[str, str]]) -> str:
    """The answer, by the template and the greedy choices of transformers."""
    tokenizer = AutoTokenizer.from_pretrained("model")
    network = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    written = network.generate(**asked, **settings)[0, asked["input_ids"].shape[1] :]
    return str(tokenizer.decode(written, skip_special_tokens=True)).strip()


def test_a_conversation_is_that_of_transformers(
    model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a system prompt, each answer among the turns that follow; begun anew, it is forgotten."""
    turns: list[dict[str, str]] = TURNS[:1]
    for question in ("Hi", "And then?"):
        turns = [*turns, {"role": "user", "content": question}]
        turns = [*turns, {"role": "assistant", "content": written_by_transformers(turns)}]
    words = ["--system", "Be brief.", "--json"]
    found = talk(capfd, monkeypatch, ["Hi", "", "And then?"], *words)
    assert json.loads("\n".join(found)) == {"messages": turns}
    found = talk(capfd, monkeypatch, ["Hello", "/reset", "Hi", "/exit", "more"], *words)
    assert json.loads("\n".join(found)) == {"messages": turns[:3]}
    [answer, *prompt] = talk(capfd, monkeypatch, ["Hi", "/prompt"], "--system", "Be brief.")
    assert answer == turns[2]["content"]
    tokenizer = AutoTokenizer.from_pretrained("model")
    assert "\n".join(prompt)[:-1] == tokenizer.apply_chat_template(TURNS, add_generation_prompt=True, tokenize=False)


TOOLS = [{"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {}}}]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
PLAIN += "{% if add_generation_prompt %}assistant: {% endif %}"
WITH_TOOLS = "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}" + PLAIN


def test_tools_are_in_what_the_model_reads(
    model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is the result of one; a template that cannot write them says so."""
    Path("tools.json").write_text(json.dumps(TOOLS))
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi"))
    assert main(["chat", "model", "--tools", "tools.json"]) == 65
    assert "cannot write tools" in capfd.readouterr().err
    Path("model/chat_template.jinja").write_text(WITH_TOOLS)
    found = "\n".join(talk(capfd, monkeypatch, ["Hi", "/tool noon", "/prompt"], "--tools", "tools.json"))
    assert f"tools: {json.dumps(TOOLS)}" in found and "tool: noon<|endoftext|>assistant: " in found
    Path("tools.json").write_text("{}")
    assert main(["chat", "model", "--tools", "tools.json"]) == 2


def test_a_conversation_that_is_too_long_is_refused(
    model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi " * 200))
    assert main(["chat", "model"]) == 65
    assert "error[CHAT004]: the conversation has" in capfd.readouterr().err
