"""``shardwise data preview`` and what ``data prepare`` says of samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.app import main
from shardwise.cli.preview import mark
from shardwise.data import tokens
from shardwise.data.micro_batch import collate
from shardwise.data.pack import open_windows
from shardwise.data.prepare import prepare
from shardwise.models.resolve import data_of
from shardwise.spec.load import load_recipe
from tests.said import refuses, shows


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    talks = [
        [{"role": "user", "content": "say yes"}, {"role": "assistant", "content": "yes"}],
        [{"role": "user", "content": "say <|endoftext|>"}, {"role": "assistant", "content": "no " * 100}],
    ]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    (tmp_path / "tokenizer").mkdir()
    tokens.train_tokenizer(["say yes no user assistant " * 50], 300, tmp_path / "tokenizer")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"method: sft\ntrain: {{seq_len: 64}}\ndata:\n  path: {tmp_path}/talks.jsonl\n  cache: {tmp_path}/cache\n"
        f"  validation_share: 0\n  num_proc: 1\n  chat_template: zephyr\n  tokenizer: {{path: {tmp_path}/tokenizer}}\n"
    )
    return path


def test_it_shows_what_is_learnt_and_how_much(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "preview", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert "<|user|>\nsay yes<|endoftext|>\n<|assistant|>\n«yes<|endoftext|>»\n" in out
    assert main(["data", "preview", str(recipe), "--json", "-n", "1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["samples"]) == 1 and told["samples"][0][1] == {"text": "yes<|endoftext|>", "supervised": True}
    assert told["samples_in_all"] == 2 and told["windows"] == 2 and told["lengths"]["most"] == 64
    assert sum(count for _, count in told["histogram"]) == 2
    assert told["supervised_share"] == told["supervised_tokens"] / told["tokens"]
    assert told["filled"] == told["tokens"] / 128
    lost = told["counts"]["cut_tokens"]
    assert told["counts"] == {"truncated": 1, "cut_tokens": lost, "cut_answers": 1, "disarmed": 1} and lost > 50
    for values in (
        ("samples", 2, f"{told['tokens']} tokens"),
        ("supervised", f"{told['supervised_tokens']} tokens", f"{told['supervised_share']:.1%}"),
        ("windows", 2, f"{told['filled']:.1%} filled"),
        ("truncated", 1, "train.seq_len"),
        ("cut_tokens", lost),
        ("cut_answers", 1),
        ("disarmed", 1, "special tokens"),
    ):
        assert shows(out, *values)


@pytest.mark.parametrize("masked", [True, False])
def test_of_plain_text_all_is_learnt_that_is_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], masked: bool
) -> None:
    """As many labels as the windows of a run have, which leave out what follows nothing that is seen."""
    (tmp_path / "tokenizer").mkdir()
    tokens.train_tokenizer(["say yes no " * 50], 300, tmp_path / "tokenizer")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"say {k} yes"}) + "\n" for k in range(9)))
    words = [f"data.path={tmp_path}/texts.jsonl", f"data.cache={tmp_path}/cache", "data.validation_share=0"]
    words += [f"data.tokenizer.path={tmp_path}/tokenizer", "train.seq_len=16", f"data.mask_documents={masked}"]
    assert main(["data", "preview", *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    prepared = prepare(data_of(load_recipe(None, words)), sample_tokens=None)
    windows = open_windows(prepared.train, 16, masked)
    labels = collate([windows[k] for k in range(len(windows))]).supervised_tokens()
    assert told["supervised_tokens"] == labels < told["tokens"]
    assert [sample[0]["supervised"] for sample in told["samples"]] == [False, not masked, not masked]


def test_it_tells_which_files_of_a_directory_are_read(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = recipe.parent / "talks"
    directory.mkdir()
    (recipe.parent / "talks.jsonl").rename(directory / "talks.jsonl")
    for name in ("readme.md", "picture.png", "other.PNG", "LICENSE"):
        (directory / name).write_bytes(b"\x89PNG")
    assert main(["data", "preview", str(recipe), f"data.path={directory}"]) == 0
    values = "files", directory, "1 .jsonl", "left out", "1 .md", "2 .png", "1 no suffix"
    assert shows(capsys.readouterr().out, *values)


def test_it_tells_how_many_are_held_out(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "preview", str(recipe), "data.validation_share=0.1"]
    assert main(words) == 0
    assert shows(capsys.readouterr().out, "held out", "1 record")
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["samples_in_all"], told["held_out"]) == (1, 1)


def test_prepare_tells_the_share_learnt(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "prepare", str(recipe), f"data.validation_path={recipe.parent}/talks.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "supervised tokens (" in out and "windows of 64" in out
    assert refuses(out, "DATA011", "2 samples", "train and validation", as_warning=True)


def test_splits_by_another_name_are_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "preview", str(recipe), "--split", "test"]) == 2
    assert "'train', 'validation'" in capsys.readouterr().err


def test_nothing_to_learn_is_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recipe.parent / "talks.jsonl").write_text('{"messages": [{"role": "user", "content": "say yes"}]}\n')
    assert main(["data", "preview", str(recipe)]) == 65
    assert refuses(capsys.readouterr().err, "CHAT002", "talks.jsonl:1", "assistant")


def test_keys_for_fine_tuning_mean_nothing_to_pretraining(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "prepare", str(recipe), "method=pretrain"]) == 78
    assert refuses(capsys.readouterr().err, "CFG008", "`data.chat_template`", "`method: sft`, `dpo`")


def test_colour_on_a_terminal_marks_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mark("x") == "«x»"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert mark("x") == "\x1b[32mx\x1b[0m"
