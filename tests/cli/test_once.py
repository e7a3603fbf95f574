"""On its way from the recipe to the ranks, the model is read once by each process, the plan is chosen once, and the
run's two files are written once."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from shardwise.cli.app import main
from tests.cli.counts import COUNTS, count, counted
from tests.cli.ready_ranks import ReadyRanks
from tests.cli.test_tp_run import MODEL
from tests.runtime.small_run import write_text

WORDS = [
    f"model.config={json.dumps(MODEL)}",
    *["data.path=text", "data.cache=cache", "data.tokenizer.vocab_size=321", "train.seq_len=16"],
    *["train.global_batch_size=4", "train.max_steps=2", "evaluate.max_batches=2", "run.device=cpu"],
]


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_text(Path("text"))
    monkeypatch.setenv(COUNTS, str(tmp_path / "counts"))
    count(monkeypatch.setattr)
    return tmp_path / "counts"


def test_plan(counts: Path) -> None:
    assert main(["plan", *WORDS, "run.nproc=2"]) == 0
    assert counted(counts) == {"start: resolve": 1}  # it searches for more plans than the one that would run


@pytest.mark.prove
@pytest.mark.parametrize("ranks", [1, 2])
def test_train(counts: Path, ranks: int) -> None:
    """The launcher writes both files, which is how the ranks get them. A run that goes on keeps its own until the
    checkpoint has been loaded: its ranks read others, and rank 0 replaces them."""
    read = {"start: resolve": 1, "start: choose": 1, "rank: resolve": ranks}
    assert main(["train", *WORDS, f"run.nproc={ranks}", "--run", "a"]) == 0
    assert counted(counts) == read | {"start: writes a/recipe.yaml": 1, "start: writes a/plan.yaml": 1}
    plan = Path("runs/a/plan.yaml").read_text()
    assert main(["train", *WORDS, f"run.nproc={ranks}", "--run", "a", "--resume", "train.max_steps=3"]) == 0
    handed = {"start: writes resumed/recipe.yaml": 1, "start: writes resumed/plan.yaml": 1}
    found = counted(counts)
    assert found.pop("rank: writes a/plan.yaml", 0) <= (Path("runs/a/plan.yaml").read_text() != plan)
    assert found == read | handed | {"rank: writes a/recipe.yaml": 1}


@pytest.mark.prove
def test_ranks_of_torchrun(counts: Path, ready: ReadyRanks) -> None:
    """Nobody starts them but torchrun: each makes the plan, and rank 0 writes the files."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert ready.launch(["train", *WORDS, "--run", "a"], 2, Path("runs/a"), port).exit_code == 0
    files = {f"rank: writes a/{name}.yaml": 1 for name in ("recipe", "plan")}
    assert counted(counts) == {"rank: resolve": 2, "rank: choose": 2} | files
