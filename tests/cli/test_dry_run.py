"""A dry run opens the data that are prepared already."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.cli.app import main
from shardwise.data import store
from shardwise.data.prepare import prepare
from shardwise.spec.recipe import Data
from tests.models.test_config import SMALL


def test_a_dry_run_opens_the_prepared_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").mkdir()
    for name in "abc":
        (tmp_path / "text" / f"{name}.txt").write_text(f"some words of {name}\n" * 400)
    made = tmp_path / "made"
    prepare(Data(path=str(tmp_path / "text"), cache=str(tmp_path / "cache")), out=made)
    model = [f"model.config.{key}={value}" for key, value in (SMALL | {"vocab_size": 4096}).items()]
    words = [
        "train",
        "--dry-run",
        "--nproc",
        "1",
        *model,
        f"data.path={made}",
        "train.seq_len=64",
        f"run.out={tmp_path}",
    ]
    assert main([*words, "train.global_batch_size=2"]) == 0
    assert main([*words, "train.global_batch_size=4096"]) == 65
    assert "error[DATA003]" in capsys.readouterr().err
    (made / store.MANIFEST).write_text("{}")
    assert main([*words, "train.global_batch_size=2"]) == 65
    assert "error[DATA013]" in capsys.readouterr().err
