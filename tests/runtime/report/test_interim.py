"""``report.html`` while a run goes on: as far as it has come, at the cost of its own steps, and no end of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.runtime.report import interim
from shardwise.runtime.report.interim import InterimPage
from shardwise.runtime.report.report_page import REPORT_PAGE
from tests.pages.parsed import Parsed, faults
from tests.runtime.report.test_report_page import row, write


def shown(directory: Path) -> str:
    text = (directory / REPORT_PAGE).read_text(encoding="utf-8")
    assert faults(text) == []
    return " ".join(Parsed(text).words.split())


def add(directory: Path, steps: range) -> None:
    with (directory / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row(step)) + "\n" for step in steps)


def test_it_has_the_run_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interim, "SHARE", 1e9)
    write(tmp_path, [row(step, skipped=step == 4) for step in range(1, 6)])
    said = list[str]()
    page = InterimPage(tmp_path, 1000, said.append)
    page.write()
    assert "5 of 1,000" in (first := shown(tmp_path)) and f"train {tmp_path}" in first
    assert "1 step was skipped" in first
    add(tmp_path, range(6, 9))
    page.write()
    assert "8 of 1,000" in shown(tmp_path) and said == []


def test_a_line_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of a long run do not each read it from its beginning."""
    monkeypatch.setattr(interim, "SHARE", 1e9)
    write(tmp_path, [row(step) for step in range(1, 2001)])
    page = InterimPage(tmp_path, 9000, print)
    page.write()
    read = list[bytes]()
    add_row = page._followed._add_row
    monkeypatch.setattr(page._followed, "_add_row", lambda line: (read.append(line), add_row(line)))
    add(tmp_path, range(2001, 2004))
    page.write()
    assert len(read) == 3 and "2,003 of" in shown(tmp_path)


def test_a_long_run_that_is_resumed_is_read_a_while_at_each_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interim, "SHARE", 1e9)
    monkeypatch.setattr(interim, "READ_S", 1e-9)  # a MiB each time
    write(tmp_path, [])
    add(tmp_path, range(1, 12_001))
    page, size = InterimPage(tmp_path, 20_000, print), (tmp_path / "metrics.jsonl").stat().st_size
    checkpoints = 0
    while not (tmp_path / REPORT_PAGE).exists():
        page.write()
        checkpoints += 1
    assert size > 2**20 and checkpoints == size // 2**20 + 1 and "12,000 of" in shown(tmp_path)


def test_pages_take_a_small_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that saves after every step does not draw a page after every step."""
    write(tmp_path, [row(1)])
    page, now, drawn = InterimPage(tmp_path, 9, print), [0.0], list[float]()
    make = page._page

    def draws() -> object:
        drawn.append(now[0])
        now[0] += 0.5
        return make()

    monkeypatch.setattr(interim.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(page, "_page", draws)
    while now[0] < 200:
        page.write()
        now[0] += 1.0
    assert len(drawn) == 4 and 0.5 * len(drawn) <= 0.01 * now[0] + 0.5


def test_what_goes_wrong_is_told_and_no_more(tmp_path: Path) -> None:
    write(tmp_path, [row(1)])
    (tmp_path / REPORT_PAGE).mkdir()
    said = list[str]()
    InterimPage(tmp_path, 9, said.append).write()
    assert len(said) == 1 and said[0].startswith(f"warning[REP001]: {REPORT_PAGE}")
