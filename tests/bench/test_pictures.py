"""The pictures of the README show what the commands print today. Make them anew: ``python bench/pictures.py``."""

from __future__ import annotations

import re
from pathlib import Path
from runpy import run_path

import pytest

from shardwise.cli.app import main

PICTURES = run_path(str(Path(__file__).parents[2] / "bench" / "pictures.py"))
PLAN: str = PICTURES["PLAN"]


def shown_in(picture: str) -> str:
    text: str = PICTURES["text_of"](PICTURES["TARGET"] / f"{picture}.svg")
    return text


def without_spaces(text: str) -> str:
    """Lines are broken at the picture's width."""
    return re.sub(r"\s", "", text)


@pytest.mark.prove
def test_the_picture_of_a_plan_is_what_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PLAN.split()[1:]) == 0
    printed = without_spaces(f"$ {PLAN}\n{capsys.readouterr().out}")
    assert without_spaces(shown_in("plan")) == printed, "python bench/pictures.py plan"


def test_the_picture_of_a_run_has_the_plan_that_train_makes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What is measured differs from run to run. The dtype that a processor computes in is that of the picture."""
    shown = without_spaces(shown_in("train"))
    compute = "bf16" if "computebf16" in shown else "fp32"
    (tmp_path / "a.txt").write_text("text")  # any data will do
    words = ["--nproc", "2", f"precision.compute={compute}", f"data.path={tmp_path}"]
    assert main(["train", "--dry-run", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("memory"))
    last = next(number for number, line in enumerate(lines) if line.startswith("traffic"))
    for line in lines[first : last + 1]:
        memory_of_the_machine = r"of[\d.]+[GT]iB\(\d+%\)"
        assert re.sub(memory_of_the_machine, "", without_spaces(line)) in re.sub(memory_of_the_machine, "", shown)
