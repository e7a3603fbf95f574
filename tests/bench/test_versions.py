"""Two versions of the package in turns: here one against itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.said import shows

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(REPOSITORY / "bench" / "step.py"), "--rows", "1", "--pairs", "3", "--exact"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.big
@pytest.mark.timeout(300)
def test_a_version_computes_what_it_computes_itself() -> None:
    ended = subprocess.run(
        [*COMMAND, "--case", "ddp-fp32", "--against", str(REPOSITORY)], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    case, against, ratio = ended.stdout.splitlines()[-1].split()[:3]
    assert (case, against) == ("ddp-fp32", "before")
    assert 0.1 < float(ratio) < 10


@pytest.mark.prove
def test_what_is_no_checkout_is_refused(tmp_path: Path) -> None:
    ended = subprocess.run([*COMMAND, "--against", str(tmp_path)], capture_output=True, text=True)
    assert ended.returncode == 2
    assert shows(ended.stderr, tmp_path, "checkout of Shardwise")
