"""``shardwise data prepare``: what it prints, what it leaves, and its errors and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.app import main
from shardwise.cli.data import stages
from shardwise.data import store, tokens
from tests.said import refuses, shows


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    for index in range(6):
        (tmp_path / "text" / f"{index}.txt").write_text(f"chapter {index}: the same words again\n" * 20)
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"data:\n  path: {tmp_path}/text\n  cache: {tmp_path}/cache\n  tokenizer:\n    vocab_size: 300\n  num_proc: 1\n"
    )
    return path


def test_it_prepares_and_says_what(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "prepare", str(recipe), "--out", str(tmp_path / "out")]) == 0
    prepared = store.load(tmp_path / "out")
    train = prepared.train.split
    lines = capsys.readouterr().out.splitlines()
    assert shows(lines[0], "train", f"{train.tokens:,} tokens", f"{train.documents} documents", "0.0 MB")
    assert lines[-1] == f"directory   {tmp_path}/out"
    assert main(["data", "prepare", str(recipe), "data.validation_share=0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["splits"]) == ["train"] and told["splits"]["train"]["documents"] == 6
    assert Path(told["directory"]).parent == tmp_path / "cache" / "data"


def test_one_document_is_one(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(recipe), f"data.path={tmp_path}/text/0.txt", "data.validation_share=0"]
    assert main(["data", "prepare", *words]) == 0
    assert shows(capsys.readouterr().out, "1 document", "0.0 MB")


def test_errors_have_code_place_and_remedy(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"txt": "a"}\n')
    assert main(["data", "prepare", str(recipe), f"data.path={bad}"]) == 65
    err = capsys.readouterr().err
    assert refuses(err, "DATA005", "bad.jsonl:2", "no `text`", "txt", where=bad, fix="data.text_key=txt")
    assert shows(err.splitlines()[2], "data.on_bad_sample=skip") and err.count("\n") == 3
    assert main(["data", "prepare", str(recipe), f"data.path={tmp_path}/texts"]) == 66
    assert refuses(capsys.readouterr().err, "DATA001", f"`{tmp_path}/texts`", f"{tmp_path}/text?")


def test_changed_data_is_refused_until_forced(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["data", "prepare", str(recipe), "--out", str(tmp_path / "out")]
    assert main(command) == 0
    (tmp_path / "text" / "2.txt").write_text("another chapter\n" * 9)
    capsys.readouterr()
    assert main([*command, f"data.tokenizer.path={tmp_path}/out/tokenizer"]) == 65
    said = capsys.readouterr().err
    assert said.startswith(f"error[DATA013]: {tmp_path}/text/2.txt changed ")
    assert f"\nwhere: {tmp_path}/out\n" in said and "--force" in said
    assert main([*command, "--force"]) == 0
    assert main(command) == 0


def test_a_bar_follows_what_is_told_last() -> None:
    """Each URL has a length of its own, or none that is known."""
    with stages(hidden=True) as said:
        for done, total in ((10, 100), (100, 100), (10, 1000), (1000, 1000)):
            said("fetching", done, total)
            [task] = said.bar.tasks
            assert (task.completed, task.total) == (done, total)
        said("tokens", 5, 0)
        assert (said.bar.tasks[1].completed, said.bar.tasks[1].total) == (5, None)


def test_a_dry_run_reads_some_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    records = [{"messages": answer}, {"messages": answer[:1]}, {"text": 5}]
    Path("talks.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tokens.train_tokenizer(["some words"], 300, Path("."))
    config = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    words = ["train", "--dry-run", "method=sft", "data.path=talks.jsonl", "data.chat_template=zephyr", "--nproc", "1"]
    words += [f"model.config.{key}={value}" for key, value in config.items()]
    words += ["data.tokenizer.path=.", "data.cache=cache", "train.seq_len=64", "train.global_batch_size=2"]
    assert main(words) == 65
    err = capsys.readouterr().err
    assert "error[CHAT002]: talks.jsonl:2 " in err and "error[DATA005]: talks.jsonl:3 `text` " in err
    assert main([*words, "data.on_bad_sample=skip"]) == 0
    read, bad, *kinds = capsys.readouterr().out.splitlines()[-5:-1]
    assert shows(read, "data", "1 samples") and shows(bad, "2 bad", "data.on_bad_sample: skip")
    assert [kind.split()[0] + kind.rpartition(" ")[2] for kind in kinds] == ["1(DATA005)", "1(CHAT002)"]
    assert not Path("cache").exists() and not Path("runs").exists()
