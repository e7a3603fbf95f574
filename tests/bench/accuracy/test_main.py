"""``python -m bench.accuracy`` prints a page, JSON, and every comparison."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.accuracy.__main__ import main
from tests.bench.accuracy.published import ROW, changed
from tests.said import shows

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    rows = [
        changed(),
        changed(id="a-2", task="sft", tp="1", notes="a | in \x1b[31m notes", peak_mem_gib="10", mem_def="allocated"),
        changed(gpu="?"),
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*ROW, "notes", "peak_mem_gib", "mem_def"])
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_json_and_rows(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(table), "--json", "--rows", str(tmp_path / "made" / "out.csv")])
    report = json.loads(capsys.readouterr().out)
    assert report["rows"] == 3 and report["skipped"] == {"unknown GPU": 1}
    assert [report["groups"][name]["n"] for name in ("dense_16bit", "fine_tune", "memory")] == [1, 1, 1]
    with (tmp_path / "made" / "out.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [(row["id"], row["group"]) for row in written] == [
        ("a-1", "dense_16bit"),
        ("a-1", "dense_16bit_stated"),
        ("a-2", "memory"),
        ("a-2", "memory_allocated"),
        ("a-2", "fine_tune"),
    ]
    for row in written:
        error = 100 * (float(row["predicted"]) / float(row["measured"]) - 1)
        assert float(row["error_pct"]) == pytest.approx(error)
    assert float(written[0]["measured"]) == 8.192 and float(written[2]["measured"]) == 10
    assert report["groups"]["dense_16bit"]["median_signed"] == pytest.approx(float(written[0]["error_pct"]), abs=0.01)


def test_the_page(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    main([str(table), "--markdown", str(page)])
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and shows(shown, "3 rows", "2 are compared")
    lines = page.read_text().splitlines()
    assert "| 1 | unknown GPU |" in lines
    assert any(line.startswith("| a-2, Llama2 7B | memory |") and "says: a / in" in line for line in lines)
    widths = {line.count("|") for line in lines if line.startswith(("| dense", "| fine", "| memory", "| group"))}
    assert widths == {9}, "every row of the table has as many cells"


def test_the_page_of_the_docs_is_of_this_form() -> None:
    """Its words, outside the figures and tables, are those of the report's page."""
    made = (REPOSITORY / "bench" / "accuracy" / "page.md").read_text().replace("{name}", "published.csv")
    kept = (REPOSITORY / "docs" / "accuracy.md").read_text()
    plain = [line for line in made.splitlines() if "{" not in line]
    assert [line for line in plain if line not in kept.splitlines()] == []


@pytest.mark.parametrize("module", ["bench.accuracy", "bench.accuracy.fit"])
def test_what_is_not_a_table(tmp_path: Path, module: str) -> None:
    """Of the commands as they are typed at a clone's root: told in a line, and no traceback."""
    (tmp_path / "notes.txt").write_text("measured yesterday\n")
    command = [sys.executable, "-m", module, str(tmp_path / "notes.txt")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    [told] = done.stderr.splitlines()
    assert shows(told, "notes.txt", "first line")
