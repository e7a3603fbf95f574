"""The card of an export, and its way to the Hub, of which a stand-in records what it is sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import LocalTokenNotFoundError

from shardwise.cli.app import main
from shardwise.cli.card import card_of, push, write_card
from shardwise.errors import UnavailableError
from shardwise.runtime.report.run_files import read_history
from tests.said import refusal


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory as its files are written."""
    run = tmp_path / "mine"
    run.mkdir()
    recipe = "model: {path: org/base}\ndata: {path: 'https://me:secret@host/a.jsonl'}\n"
    recipe += "method: {name: sft}\nlora: {rank: 16}\n"
    (run / "recipe.yaml").write_text(recipe)
    lines = [{"step": step, "loss": 3.0 / step, "tokens": 64} for step in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "events.jsonl").write_text(json.dumps({"event": "validation", "step": 3, "nats_per_token": 1.25}) + "\n")
    return run


def test_the_hub_reads_what_the_card_says(run: Path) -> None:
    text = card_of(read_history(run))
    card = ModelCard(text)
    assert card.data.base_model == "org/base" and card.data.library_name == "transformers"
    assert set(card.data.tags) == {"shardwise", "sft"}
    assert "loss of step 3: 1.0000" in text and "1.2500" in text and "lora.rank: 16" in text
    assert "secret" not in text


def test_a_card_that_somebody_wrote_is_left_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    write_card(run, tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_model_is_pushed_with_the_login_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[tuple[str, object]]()
    monkeypatch.setattr(
        HfApi, "create_repo", lambda self, name, **more: sent.append((name, more["private"])) or "address"
    )
    monkeypatch.setattr(
        HfApi, "upload_folder", lambda self, **more: sent.append((more["repo_id"], more["folder_path"]))
    )
    assert push(tmp_path, "org/mine") == "address"
    assert sent == [("org/mine", True), ("org/mine", tmp_path)]

    def refused(self: HfApi, *words: object, **more: object) -> None:
        raise LocalTokenNotFoundError("no token")

    monkeypatch.setattr(HfApi, "create_repo", refused)
    with pytest.raises(UnavailableError, match=refusal("MOD003", "org/mine", "no token")):
        push(tmp_path, "org/mine")


def test_a_name_that_is_none_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="cannot be pushed"):
        push(tmp_path, "not a name")


def test_without_a_run_there_is_nothing_to_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), "--push", "org/mine"]) == 66
