"""The measurement of predicted against measured seconds: its table, and its cases, each of which can be planned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from shardwise.cli.app import main
from tests.said import shows

SECONDS: dict[str, Any] = run_path(str(Path(__file__).parents[2] / "bench" / "seconds.py"))
Pair = SECONDS["Pair"]


def test_the_table_by_hand() -> None:
    """Ratios of 0.8, 1.0, 1.1 and 1.5: a median of 1.05, quartiles of 0.95 and 1.2."""
    times = (("b", 1.6, 2.0), ("a", 1.0, 1.0), ("b", 2.2, 2.0), ("a", 1.5, 1.0))
    lines = SECONDS["told"]([Pair(case, predicted, measured, 0.5, {}) for case, predicted, measured in times])
    assert lines[1].split() == ["b", "1.600", "s", "2.000", "s", "0.80", "0.50"]
    assert shows(lines[-2], "median 1.05", 0.95, "1.20", 4)
    assert shows(lines[-1], "predicted: a < b", "measured")
    swapped = SECONDS["told"]([Pair("a", 1.0, 3.0, 0.5, {}), Pair("b", 2.0, 1.0, 0.5, {})])
    assert shows(swapped[-1], "predicted: a < b", "measured b < a")


def test_what_another_program_works_is_counted() -> None:
    """One that this process has not waited for yet; in hundredths of a second, as Linux counts."""
    before = SECONDS["busy_s"]()
    loop = "import os, time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", loop], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"done\n"
        assert SECONDS["busy_s"]() - before > 0.3 - 4 / os.sysconf("SC_CLK_TCK")
        other.kill()


@pytest.mark.parametrize("case", SECONDS["CASES"])
def test_each_case_is_what_its_name_says(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SECONDS["CASES"][case], "--cluster", "2xCPU", "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)["plan"]
    tp, strategy, adapters = plan["layout"]["tp"], plan["shard"]["strategy"], plan["lora"]
    assert tp == (2 if case == "tp" else 1) and (adapters is not None) is (case == "lora")
    assert case in ("quickstart", "tp") or strategy == ("zero3" if case == "zero3" else "ddp")
