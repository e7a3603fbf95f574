"""``shardwise prove``: what it prints and writes, its exit codes, and what it refuses."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.cli import prove
from shardwise.cli.app import main
from shardwise.spec.load import dump_recipe
from tests.prove.planted import DRIFT
from tests.runtime.small_run import recipe
from tests.said import shows

SETTINGS = ["parallel.strategy=zero3"]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe of a tiny model on a few kilobytes of text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(dump_recipe(recipe(tmp_path, run={"nproc": 2})))
    return "mine.yaml"


@pytest.mark.prove
def test_a_certificate(made: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", made, *SETTINGS]) == 0
    told = capfd.readouterr().out
    for proof in ("drift", "recipe", "derivatives", "model", "parity", "documents", "dtypes", "checkpoint"):
        assert f"{proof:<11}  holds" in told
    [directory] = Path("certificates").iterdir()
    assert directory.name.startswith("mine-") and shows(told, "holds", f"{directory}/certificate.md")
    page = (directory / "certificate.md").read_text()
    assert page.startswith("# Certificate of `mine.yaml parallel.strategy=zero3`: holds")
    assert "does not show" in page and "vocab_size 320 -> 67" in page
    kept = json.loads((directory / "certificate.json").read_text())
    assert kept["holds"] and kept["plan"]["shard"]["strategy"] == "zero3"
    assert [check["proof"] for check in kept["checks"]] == [
        "drift",
        "drift",
        "recipe",
        "derivatives",
        "model",
        "parity",
        "documents",
        "dtypes",
        "checkpoint",
    ]
    assert directory.name == f"mine-{kept['digests']['plan'][:8]}" and len(kept["digests"]["code"]) == 64
    assert "drawn at random" in kept["rows"]  # of a directory that nobody has prepared


@pytest.mark.prove
def test_rows_of_its_own_and_json(made: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", made, "data.path=text/0.txt", "--quick", "--json", "-o", "there"]) == 0
    second = json.loads(capfd.readouterr().out)
    assert second == json.loads(Path("there/certificate.json").read_text())
    assert shows(second["rows"], "own records")
    assert "left out by --quick" in " ".join(second["not_shown"])


def test_a_plan_for_other_machines(made: str, capfd: pytest.CaptureFixture[str]) -> None:
    cluster = ["--cluster", "2x8xH100+400Gb/node", "parallel.tp=2", "train.global_batch_size=16"]
    assert main(["plan", made, *cluster, "-o", "plan.yaml"]) == 0
    capfd.readouterr()
    assert main(["prove", made, "--plan", "plan.yaml", "parallel.tp=4", "train.global_batch_size=16"]) == 78
    assert "PLAN019" in capfd.readouterr().err
    assert main(["prove", made, "--plan", "plan.yaml", "--cluster", "8xH100", *cluster[2:]]) == 78
    assert "RUN001" in capfd.readouterr().err


@pytest.mark.prove
def test_a_plan_that_was_written_for_other_machines_is_proved(made: str, capfd: pytest.CaptureFixture[str]) -> None:
    settings = ["parallel.tp=2", "train.global_batch_size=16"]
    assert main(["plan", made, "--cluster", "2x8xH100+400Gb/node", *settings, "-o", "plan.yaml"]) == 0
    told = capfd.readouterr().out.rpartition("before that, on any machine: shardwise ")[2]
    assert main(shlex.split(told)) == 0
    assert "of 16 (" in capfd.readouterr().out


@pytest.mark.prove
def test_what_fails_is_named_with_the_smallest_layout(made: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A fault in the code that both ranks run: each of them votes once too often."""
    with DRIFT["a vote too many"].planted():
        assert main(["prove", made, *SETTINGS, "--quick"]) == 1
    told = capfd.readouterr().out
    seen = "all_reduce", "24 bytes", "world", "1 predicted", "2 measured"
    place = "fails", "rank 1 of 2", "dp_shard 1"
    assert sum(line.startswith("drift ") and shows(line, *place, *seen) for line in told.splitlines()) == 1
    assert (
        shows(told, "drift fails", "dp_replicate 2", "passes without dp_replicate 2") and "parity       holds" in told
    )
    assert "drift failed; written" in told
    [page] = Path("certificates").rglob("*.md")
    assert shows(page.read_text(), "| **fails**", *seen)
    assert shows(page.read_text(), "* ", "drift fails", "dp_replicate 2", "passes without dp_replicate 2")
    [kept] = Path("certificates").rglob("*.json")
    found = json.loads(kept.read_text())
    assert not found["holds"] and found["smallest_failing"]["drift"]["passes_without"] == ["dp_replicate 2"]


def test_a_machine_too_small_for_the_ranks(
    made: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prove, "available_memory_bytes", lambda: 1)
    assert main(["prove", made, *SETTINGS]) == 0
    told = capfd.readouterr().out
    assert "be shown holds" in told
    assert shows(told, "drift", "data", "recipe", "2 ranks")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--quick", "--thorough"], 2, "CLI001"),
        (["--qick"], 2, "did you mean `--quick`?"),
        (["--plan", "missing.yaml"], 66, "missing.yaml"),
        (["parallel.tp=3"], 78, "PLAN001"),
        (["--cluster", "8xH10O"], 78, "H10O"),
        (["-o", "mine.yaml"], 73, "mine.yaml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input(made: str, words: list[str], code: int, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", made, *words]) == code
    assert said in capfd.readouterr().err
    assert not Path("certificates").exists() or not list(Path("certificates").rglob("*.md"))


@pytest.mark.prove
def test_ctrl_c_leaves_no_certificate_and_no_rank(made: str) -> None:
    words = [sys.executable, "-m", "shardwise", "prove", made, *SETTINGS]
    started = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert started.stdout is not None
    assert started.stdout.readline().startswith("drift")
    time.sleep(1.0)
    os.killpg(started.pid, signal.SIGINT)
    _, err = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "Traceback" not in err
    assert not list(Path("certificates").rglob("*.md"))
    with pytest.raises(ProcessLookupError):  # the process that ranks are forked from first loads what it was told to
        for _ in range(200):
            os.killpg(started.pid, 0)
            time.sleep(0.1)
