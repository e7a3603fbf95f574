"""``shardwise plan-accuracy`` prints a page, JSON, and every comparison, without torch."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli.app import main
from tests.prove.accuracy.published import ROW, changed


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


@pytest.mark.parametrize("option", ["--rows", "--markdown"])
@pytest.mark.parametrize("name", ["", "rows.csv/x"])
def test_what_cannot_be_written(table: Path, option: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(table.parent.parent.iterdir())
    assert main(["plan-accuracy", str(table), option, str(table.parent / name)]) == 73
    assert "error[OUT002]: cannot write " in capsys.readouterr().err
    assert list(table.parent.iterdir()) == [table] and sorted(table.parent.parent.iterdir()) == before


def test_json_and_rows(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-accuracy", str(table), "--json", "--rows", str(tmp_path / "out.csv")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rows"] == 3 and report["skipped"] == {"unknown GPU": 1}
    assert [report["groups"][name]["n"] for name in ("dense_16bit", "fine_tune", "memory")] == [1, 1, 1]
    with (tmp_path / "out.csv").open(newline="") as file:
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
    assert main(["plan-accuracy", str(table), "--markdown", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "Of 3 rows 2 are compared." in shown
    lines = page.read_text().splitlines()
    assert "| 1 | unknown GPU |" in lines
    assert any(line.startswith("| a-2, Llama2 7B | memory |") and "it says: a / in" in line for line in lines)
    widths = {line.count("|") for line in lines if line.startswith(("| dense", "| fine", "| memory", "| group"))}
    assert widths == {9}, "every row of the table has as many cells"


def test_what_is_not_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("measured yesterday\n")
    assert main(["plan-accuracy", str(tmp_path / "notes.txt")]) == 78
    assert "error[ACC001]: not a table of measurements" in capsys.readouterr().err
    assert main(["plan-accuracy", str(tmp_path / "none.csv"), "--json"]) == 66
    assert json.loads(capsys.readouterr().out)["error"]["problems"][0]["code"] == "CFG011"


def test_torch_is_not_loaded(table: Path) -> None:
    program = (
        "import sys; from shardwise.cli.app import main; "
        f"code = main(['plan-accuracy', {str(table)!r}, '--json']); sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
