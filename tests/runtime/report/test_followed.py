"""Logs that are read on while a run writes them: the same run as when it is read at once, in bounded memory."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.runtime.report.curves import MOST_EVENTS, curves
from shardwise.runtime.report.followed import PAGE_PIXELS, TRACE_PIXELS, FollowedLog, FollowedRun, LossTrace
from shardwise.runtime.report.run_files import History, read_history
from shardwise.spec.load import dump_recipe
from shardwise.spec.recipe import Recipe


def line(step: int, **changes: Any) -> str:
    figures = {"loss": 5 - 1e-5 * step, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens_per_s": 100.0, "seconds": 0.5}
    row = {"step": step, "tokens": 64 * step, **figures, "memory_bytes": 2**30, "skipped": False}
    return json.dumps(row | changes) + "\n"


def write(directory: Path, lines: list[str], events: list[dict[str, Any]] | None = None) -> Path:
    (directory / "recipe.yaml").write_text(dump_recipe(Recipe()))
    (directory / "metrics.jsonl").write_text("".join(lines))
    found = events or [{"event": "start", "step": 0, "ranks": 2}]
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in found))
    return directory


def whole(followed: FollowedRun) -> History:
    """The run once all of it has been read."""
    followed.read_on()
    while followed.behind:
        followed.read_on()
    return followed.history()


def told(history: History) -> list[str]:
    """What each picture says of its least and its most."""
    return [picture.svg.partition('aria-label="')[2].partition('"')[0] for picture in curves({"run": history})]


def test_a_short_run_is_what_it_is_when_read_at_once(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [{"event": "start", "step": 0, "ranks": 2}]
    events += [{"event": "validation", "step": 5, "nats_per_token": 4.5}, {"event": "end", "step": 9}]
    run = write(tmp_path, [line(step, loss=None if step == 4 else 1.0) for step in range(1, 10)], events)
    found, expected = whole(FollowedRun(run)), read_history(run)
    assert found.rows == expected.rows and found.recipe == expected.recipe
    assert (found.validation, found.finished, found.ranks) == (expected.validation, expected.finished, expected.ranks)


def test_of_a_long_run_what_pictures_show_is_kept(tmp_path: Path) -> None:
    """Single steps that stand out stay, whichever figure they are of, and the last step does."""
    odd: dict[int, dict[str, Any]] = {7_001: {"loss": 40.0}, 13_333: {"grad_norm": 1e6}, 15_001: {"tokens_per_s": 0.5}}
    odd |= {21_234: {"seconds": 90.0}, 22_345: {"memory_bytes": 1}, 12_345: {"skipped": True, "loss": None}}
    run = write(tmp_path, [line(step, **odd.get(step, {})) for step in range(1, 30_001)])
    followed = FollowedRun(run)
    found = whole(followed)
    assert told(found) == told(read_history(run))
    assert len(found.rows) < 60 * PAGE_PIXELS and {*odd, 30_000} <= {*found.rows}
    assert followed.trained_s == pytest.approx(29_999 * 0.5 + 90.0) and followed.skipped == 1


def test_the_small_curve_is_small_and_keeps_what_stands_out(tmp_path: Path) -> None:
    losses: dict[int, float | None] = {24_321: 40.0, 24_400: None, 9_000: 0.5}
    run = write(tmp_path, [line(step, loss=losses.get(step, 5.0)) for step in range(1, 30_001)])
    trace = LossTrace(run)
    assert trace.behind
    while trace.behind:
        trace.read_on()
    steps = {int(step): loss for step, loss in trace.points if math.isfinite(loss)}
    assert steps[24_321] == 40.0 and steps[9_000] == 0.5 and max(steps) == 30_000
    assert len(trace.points) <= 4 * TRACE_PIXELS + 4
    assert sys.getsizeof(trace._losses) < 20_000


def test_a_step_that_was_repeated_counts_as_it_was_last(tmp_path: Path) -> None:
    run = write(tmp_path, [line(step, loss=9.0) for step in range(1, 8)])
    followed = FollowedRun(run)
    whole(followed)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(6, loss=2.0) + line(7, loss=1.0))
    assert whole(followed).losses == dict.fromkeys(range(1, 6), 9.0) | {6: 2.0, 7: 1.0}


def test_validations_and_events_are_bounded(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    for step in range(1, 8_000):
        events += [{"event": "validation", "step": step, "nats_per_token": 2.0 if step != 4_000 else 30.0}]
        events += [{"event": "checkpoint committed", "step": step}, {"event": "checkpoint failed", "step": step}]
    found = whole(FollowedRun(write(tmp_path, [line(1)], [*events, {"event": "start", "step": 9, "ranks": 3}])))
    assert len(found.validation) <= 12 * PAGE_PIXELS and found.validation[-1] == (7_999, 2.0)
    assert (4_000, 30.0) in found.validation
    assert len([one for one in found.events if one["event"] != "validation"]) == MOST_EVENTS and found.ranks == 3


def test_only_whole_lines_are_read_and_each_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = FollowedLog(path)
    assert log.more() == (False, []) and not log.behind
    path.write_bytes(b"one\ntw")
    assert log.more() == (False, [b"one"]) and log.more() == (False, [])
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert log.more() == (False, [b"two", b"three"]) and log.more() == (False, [])
    path.write_bytes(b"one\nnew\nthree\nfour\n")  # longer than before, and another
    assert log.more() == (True, [b"one", b"new", b"three", b"four"])
    path.write_bytes(b"one\n")
    assert log.more() == (True, [b"one"])
    (tmp_path / "other").write_bytes(b"one\ntwo\n")
    os.replace(tmp_path / "other", path)
    assert log.more() == (True, [b"one", b"two"])
    path.unlink()
    assert log.more() == (True, []) and log.more() == (False, [])


def test_what_is_no_log_is_refused_and_what_is_no_line_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError):
            FollowedLog(path).more()
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError):
        FollowedLog(tmp_path / "sparse").more()
    (tmp_path / "long").write_bytes(b"x" * 3_000_000 + b"\nend\n")
    log, found = FollowedLog(tmp_path / "long"), list[bytes]()
    while log.behind:
        found += log.more()[1]
    assert found[-1] == b"end"
