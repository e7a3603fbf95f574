"""``report.html``: all that report.md has, the curves of the run, and never an error that ends a run."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from shardwise.pages.charts import lines
from shardwise.pages.page import MARK
from shardwise.runtime import end
from shardwise.runtime.report.answer_tables import TaskTable, answer_tables, side_by_side
from shardwise.runtime.report.report import Report
from shardwise.runtime.report.report_page import report_page
from shardwise.runtime.report.results import Memory
from shardwise.runtime.report.run_files import read_history
from shardwise.spec.load import dump_recipe
from shardwise.spec.plan import Estimate, Seconds, Traffic
from shardwise.spec.recipe import Recipe
from tests.pages.parsed import SVG, Parsed, faults
from tests.said import shows

EVIL = "<script>alert(1)</script>"
MIB = 2**20


def write(directory: Path, rows: list[dict[str, Any]], events: list[dict[str, Any]] | None = None) -> Report:
    """A run's directory, and the report of it."""
    (directory / "recipe.yaml").write_text(dump_recipe(Recipe()))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = events or [{"event": "start", "step": 0, "ranks": 2, "time_s": 1.0}]
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in found))
    memory = {"weights": 4 * MIB, "moments": 8 * MIB, "activations": 3 * MIB}
    estimate = Estimate(memory, 15 * MIB, 64 * MIB, (Traffic("dp", "all_reduce", "gradients", 1000, 1),))
    return Report(
        directory=directory,
        steps=len(rows),
        tokens=640,
        seconds=61.0,
        step_s=0.5,
        estimate=replace(estimate, seconds=Seconds(step_s=0.4)),
        memory=Memory({"weights": 4 * MIB, "moments": 8 * MIB}, 16 * MIB, 99 * MIB),
        traffic=(Traffic("dp", "all_reduce", "", 1000, 1),),
        before=f"before {EVIL}",
        after="after & more",
        notes=["Best checkpoint: step 4."],
    )


def row(step: int, **changes: Any) -> dict[str, Any]:
    figures = {"loss": 5 - 0.1 * step, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens_per_s": 100.0 + step}
    return {
        "step": step,
        "tokens": 64 * step,
        **figures,
        "seconds": 0.5,
        "memory_bytes": MIB,
        "skipped": False,
    } | changes


def page(report: Report, tasks: tuple[TaskTable, ...] = ()) -> Parsed:
    text = report_page(report, read_history(report.directory), tasks).html()
    assert faults(text) == [] and "<script" not in text
    return Parsed(text)


def test_the_page_has_all_that_the_report_has(tmp_path: Path) -> None:
    report = write(tmp_path, [row(step) for step in range(1, 11)])
    report = replace(report, skipped=1, unsaved="the disk is full")
    told = " ".join(page(report).words.split())
    lines = [line.strip().replace("**", "") for line in report.markdown().splitlines()]
    cells = [cell.strip("|*# -:") for line in lines for cell in line.split(" | ")]
    missing = [cell for cell in cells if " ".join(cell.split()) not in told]
    assert len(cells) > 30 and not missing


def curves(found: Parsed) -> dict[str, list[int]]:
    """By the first word of a picture, how many points each of its lines has; a dot is a line of one."""
    counted = {}
    for picture in found.pictures()[:6]:
        drawn = [len((each.get("points") or "").split()) for each in picture.iter(f"{SVG}polyline")]
        counted[(picture.get("aria-label") or "").split(":")[0]] = drawn + [1 for _ in picture.iter(f"{SVG}circle")]
    return counted


def test_curves_of_all_that_is_measured(tmp_path: Path) -> None:
    events = [{"event": "start", "step": 0, "ranks": 2}, {"event": "validation", "step": 5, "nats_per_token": 4.4}]
    events += [{"event": "validation", "step": 10, "nats_per_token": 4.1}, {"event": "end", "step": 10}]
    found = page(write(tmp_path, [row(step) for step in range(1, 11)], events))
    assert curves(found) == {
        "Loss": [10, 2],
        "Gradient norm": [10],
        "Learning rate": [10],
        "Throughput": [10],
        "Time of a step": [10, 2],  # beside it what was predicted
        "Memory of rank 0": [10],
    }


def test_each_picture_of_memory_says_whose_it_is(tmp_path: Path) -> None:
    """Steps have the memory of the process on a CPU, and the plan is of what torch allocates."""
    found = page(write(tmp_path, [row(step) for step in range(1, 11)]))
    named = [each.get("aria-label") or "" for each in found.pictures()]
    assert any(shows(name, "torch", "allocates", "16.0 MiB") for name in named)
    below = found.words.partition("Memory of rank 0")[2]
    assert shows(below, "GPU", "torch", "CPU", "process")


def test_losses_that_are_not_finite_interrupt_a_curve(tmp_path: Path) -> None:
    """They are null in metrics.jsonl; the step was skipped, and the page says why."""
    rows = [row(step) for step in range(1, 11)]
    rows[4] = row(5, loss=None, grad_norm=None, skipped=True, reason=f"loss nan {EVIL}")
    found = page(write(tmp_path, rows))
    assert curves(found)["Loss"] == [4, 5]
    assert f"loss nan {EVIL}" in found.words


@pytest.mark.parametrize("rows", [[], [row(1)], [row(1, loss=None, grad_norm=None, tokens_per_s=None)]])
def test_runs_of_no_step_and_of_one(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    report = write(tmp_path, rows)
    page(replace(report, memory=None, estimate=Estimate(), step_s=0.0, traffic=(), before="", after="", notes=()))


def test_starts_and_faults_are_told(tmp_path: Path) -> None:
    events = [{"event": "start", "step": 0, "ranks": 2, "time_s": 1_700_000_000.0}]
    events += [{"event": "checkpoint failed", "step": 4, "what": f"no room {EVIL}", "time_s": 1_700_000_100.0}]
    events += [{"event": "checkpoint committed", "step": 6, "what": "gone", "time_s": 1_700_000_200.0}]
    events += [{"event": "start", "step": 6, "ranks": 4, "time_s": 1_700_000_300.0}]
    words = " ".join(page(write(tmp_path, [row(1)], events)).words.split())
    assert shows(words, "2023-11-14", "start", 0, "2 ranks", "failed", 4, f"no room {EVIL}", "start", 6, "4 ranks")
    assert "checkpoint committed" not in words


def test_a_time_that_no_calendar_has_is_left_out(tmp_path: Path) -> None:
    events = [{"event": "start", "step": 0, "ranks": 2, "time_s": 1e12}]
    assert shows(" ".join(page(write(tmp_path, [row(1)], events)).words.split()), "start", 0, "2 ranks")


def heights(picture: ElementTree.Element) -> list[float]:
    """The heights of the points of the first line of a picture, in its pixels."""
    line = next(picture.iter(f"{SVG}polyline"))
    return [float(point.split(",")[1]) for point in line.get("points", "").split()]


def test_a_slow_first_step_leaves_the_others_to_be_seen(tmp_path: Path) -> None:
    """After each start, as where compilation takes a minute; what is beyond the picture is told below it."""
    odd = {1: {"seconds": 65.0, "grad_norm": 900.0}, 11: {"seconds": 64.0}}
    rows = [
        row(step, **({"seconds": 0.5 + step % 3 / 10, "grad_norm": 1 + step % 3} | odd.get(step, {})))
        for step in range(1, 21)
    ]
    starts = [{"event": "start", "step": step, "ranks": 2, "time_s": 1.0} for step in (0, 10)]
    found = page(write(tmp_path, rows, starts))
    named = {(each.get("aria-label") or "").partition(":")[0]: each for each in found.pictures()}
    for title in ("Time of a step", "Gradient norm"):
        usual = heights(named[title])[3:10]
        assert max(usual) - min(usual) > 100, title
        assert all(0 <= y <= 250 for y in heights(named[title]))
    assert shows(found.words, "step 1: 65", "step 11: 64") and shows(found.words, "step 1: 900")


def test_first_steps_that_are_like_the_others_are_drawn_where_they_are(tmp_path: Path) -> None:
    rows = [row(step, seconds=0.9 if step == 1 else 0.5 + step % 3 / 10) for step in range(1, 21)]
    found = page(write(tmp_path, rows))
    picture = next(each for each in found.pictures() if (each.get("aria-label") or "").startswith("Time of a step"))
    first, second, third, *_ = heights(picture)
    assert first < second < third and "step 1:" not in found.words


def test_a_run_of_first_steps_alone_is_drawn(tmp_path: Path) -> None:
    """Beside them the prediction is not what is typical."""
    found = page(write(tmp_path, [row(1, seconds=65.0), row(2)]))
    first, second = heights(found.pictures()[4])
    assert second - first > 100 and "step 1:" not in found.words


def test_first_steps_of_each_of_two_runs_are_told_by_its_name() -> None:
    points = [(float(step), 65.0 if step == 1 else 0.5) for step in range(1, 12)]
    picture = lines("Time", ("step", "seconds"), {"A": points, "B": points}, {"A": {1}, "B": {1}})
    assert shows(picture.note, "A, step 1: 65", "B, step 1: 65")
    many = [(float(step), 65.0 if step < 9 else 0.5) for step in range(1, 30)]
    told = lines("Time", ("step", "seconds"), {"A": many}, {"A": set(range(9))}).note
    assert told.count("step") == 6 and shows(told, 6, "2 more")


def test_a_very_long_run_is_a_small_page(tmp_path: Path) -> None:
    rows = [row(step, loss=2.0 if step != 71_234 else 40.0) for step in range(1, 100_001)]
    text = report_page(report := write(tmp_path, rows), read_history(report.directory), ()).html()
    assert len(text) < 400_000
    loss = next(each for each in Parsed(text).pictures() if (each.get("aria-label") or "").startswith("Loss"))
    assert "to 40" in (loss.get("aria-label") or "")


def answered(directory: Path, step: int, answers: dict[str, str]) -> None:
    """A file of a task's answers by prompt, as a run writes it."""
    file = directory / "answers" / "sums" / f"step-{step:08d}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"prompt": ask, "expected": "4", "answer": text, "score": step / 2} for ask, text in answers.items()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_answers_to_tasks(tmp_path: Path) -> None:
    report = write(tmp_path, [row(1)])
    for step, answer in ((1, f"four | {EVIL}"), (2, "4")):
        answered(tmp_path, step, {"2 + 2": answer})
    tables = answer_tables(tmp_path)
    assert [(one.task, one.heads, one.rows) for one in tables] == [
        ("sums", ["step", "score", "2 + 2 (4)"], [["1", "0.500", f"four | {EVIL}"], ["2", "1.000", "4"]])
    ]
    assert f"| 1 | 0.500 | four \\| {EVIL} |" in side_by_side(tables)
    assert f"four | {EVIL}" in page(report, tuple(tables)).words


def test_answers_to_other_prompts_than_before_stand_under_their_own(tmp_path: Path) -> None:
    """A resumed run may ask more, fewer or others; a step that answered nothing is left out."""
    report = write(tmp_path, [row(1)])
    answered(tmp_path, 1, {"2 + 2": "four", "1 + 3": "five"})
    answered(tmp_path, 2, {})
    answered(tmp_path, 3, {"3 + 1": "six", "2 + 2": "seven", "0 + 4": "eight"})
    (tmp_path / "answers" / "nothing").mkdir()
    [table] = tables = answer_tables(tmp_path)
    assert table.heads[2:] == ["3 + 1 (4)", "2 + 2 (4)", "0 + 4 (4)"]
    assert table.rows == [["1", "0.500", "", "four", ""], ["3", "1.500", "six", "seven", "eight"]]
    assert {line.count(" | ") for line in side_by_side(tables) if line.startswith("| ")} == {4}
    assert "eight" in page(report, tuple(tables)).words


class Said:
    """A log that keeps what it says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def test_both_reports_are_written(tmp_path: Path) -> None:
    log = Said()
    report = write(tmp_path, [row(1), row(2)])
    end.write_reports(tmp_path, report, log)  # type: ignore[arg-type]
    assert log.lines == [] and faults((tmp_path / "report.html").read_text(encoding="utf-8")) == []
    assert (tmp_path / "report.md").is_file() and "report.html" in end.closing_lines(report, "hf/")[-4]
    assert MARK.format("run") in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("fault", ["full", "no recipe", "directory", "bug"])
def test_a_page_that_cannot_be_written_ends_no_run(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told, report.md is there, and nothing half written."""
    report, log = write(tmp_path, [row(1)]), Said()
    if fault == "full":
        own = Path.write_text

        def full(path: Path, *given: Any, **named: Any) -> int:
            if path.name.startswith("report.html"):
                own(path, "half")
                raise OSError(errno.ENOSPC, "No space left on device")
            return own(path, *given, **named)

        monkeypatch.setattr(Path, "write_text", full)
    elif fault == "no recipe":
        (tmp_path / "recipe.yaml").unlink()
    elif fault == "directory":
        (tmp_path / "report.html").mkdir()
    else:
        monkeypatch.setattr(end, "report_page", lambda *given: 1 / 0)
    end.write_reports(tmp_path, report, log)  # type: ignore[arg-type]
    assert len(log.lines) == 1 and log.lines[0].startswith("warning[REP001]: report.html")
    assert (tmp_path / "report.md").is_file()
    printed = "\n".join(end.closing_lines(report, "hf/"))
    assert "report.md" in printed and "report.html" not in printed
    assert {one.name for one in tmp_path.glob("report.html*")} <= ({"report.html"} if fault == "directory" else set())
