"""The measurement of a pipeline beside torch's own, with few rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.big
@pytest.mark.timeout(600)
def test_both_programs_compute_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with an error where first losses differ."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "pipeline.json"
    command = [sys.executable, str(REPOSITORY / "bench" / "pipeline.py"), "--pairs", "3", "--micro-batches", "2"]
    ended = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(out.read_text(encoding="utf-8"))
    assert set(told["ratio"]) == {"torch's 1f1b", "A/A"} and told["rounds"] == 3
    assert len(told["idle"]) == len(told["drawn"]) == 2
    assert all(0 < share < 1 for share in [*told["idle"], *told["drawn"]])
