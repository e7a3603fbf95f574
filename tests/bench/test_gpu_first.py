"""The measurements for a CUDA device run, tiny, on a CPU: a device's first minutes are too dear for a typing error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.said import shows

REPOSITORY = Path(__file__).resolve().parents[2]
CHEAP, MORE = ["machine", "loss", "halves"], ["attention", "memory", "host", "step"]
DEAR = ["numbers", "kernels", "speed", "run"]


@pytest.mark.big
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(CHEAP, marks=pytest.mark.prove),
        *(pytest.param(each, marks=pytest.mark.big) for each in (MORE, DEAR)),
    ],
    ids=["cheap", "more", "dear"],
)
def test_every_section_is_rehearsed(sections: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "first.md"
    command = [sys.executable, str(REPOSITORY / "bench" / "gpu_first.py"), "--rehearse", "--out", str(out)]
    ended = subprocess.run([*command, "--only", *sections], capture_output=True, text=True, check=False)
    text = out.read_text(encoding="utf-8")
    assert ended.returncode == 0, text + ended.stderr
    assert [line[4:] for line in text.splitlines() if line.startswith("### ")] == sections
    if "run" in sections:
        assert shows(text, "30 of 30", "bitwise")


@pytest.mark.prove
def test_a_section_that_fails_costs_the_others_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "src"))
    out = tmp_path / "first.md"
    command = [sys.executable, str(REPOSITORY / "bench" / "gpu_first.py"), "--rehearse", "--out", str(out)]
    ended = subprocess.run([*command, "--minutes", "0", "--only", "machine", "loss"], capture_output=True, text=True)
    assert ended.returncode == 1 and "failed: machine, loss" in ended.stderr
    assert out.read_text(encoding="utf-8").count("stopped after 0 s") == 2
