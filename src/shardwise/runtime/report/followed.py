"""The logs of a run that goes on: read on from where they were read last, and thinned to what a picture shows, so that
a long run takes no more memory than a short one."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat

from shardwise.errors import ShardwiseError
from shardwise.pages.charts import Point, thinned
from shardwise.runtime.report.curves import CURVES, MOST_EVENTS, MOST_SKIPPED, ORDINARY
from shardwise.runtime.report.report import Report
from shardwise.runtime.report.run_files import EventLine, History, StepLine, history_of
from shardwise.spec.files import LINE_BYTES, LOG_BYTES, check_size, open_regular
from shardwise.spec.load import load_plan
from shardwise.spec.plan import Estimate
from shardwise.spec.record import Numbered, from_json

TRACE_PIXELS, PAGE_PIXELS = 40, 240
"""In how many columns the small curve of a run is thinned, and those of its page."""
TAIL_BYTES = 64
"""How many bytes before the place that was reached must still be the same."""
MOST_UNREAD = 20
"""How many lines that cannot be read are named."""


@dataclass(frozen=True)
class _LossLine(Numbered):
    """The part of a line of metrics.jsonl that the small curve shows; null is a value that was not finite."""

    loss: FiniteFloat | None = None


class FollowedLog:
    """A log to which another process adds lines. ``behind``: whether it may have more than has been read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.behind = True
        self._offset, self._tail, self._seen = 0, b"", (0, 0, 0)

    def more(self) -> tuple[bool, list[bytes]]:
        """Return whether the file is another one than before, so that what was read of it counts no more, and the next
        whole lines, a MiB of them at most. Raises OSError for what is no regular file or larger than a log can be."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return self._begin_again(), []
        if self._seen == (found.st_ino, found.st_size, found.st_mtime_ns) and not self.behind:
            return False, []
        with open_regular(self.path) as file:
            check_size(file, self.path, LOG_BYTES)
            now = os.fstat(file.fileno())
            file.seek(self._offset - len(self._tail))
            same = now.st_ino == self._seen[0] and file.read(len(self._tail)) == self._tail
            anew = not same and self._begin_again()
            file.seek(self._offset)
            read = file.read(LINE_BYTES)
        end = read.rfind(b"\n") + 1
        if not end and len(read) == LINE_BYTES:  # no line of ours is so long: it is passed over
            end = len(read)
        self._offset, self._tail = self._offset + end, (self._tail + read[:end])[-TAIL_BYTES:]
        self._seen, self.behind = (now.st_ino, now.st_size, now.st_mtime_ns), len(read) == LINE_BYTES
        return anew, read[:end].splitlines()

    def _begin_again(self) -> bool:
        """Forget the place; return whether anything had been read."""
        begun = self._offset > 0
        self.behind, self._offset, self._tail, self._seen = False, 0, b"", (0, 0, 0)
        return begun


class LossTrace:
    """The small curve of a run's loss, from its metrics.jsonl."""

    def __init__(self, directory: Path) -> None:
        self._log = FollowedLog(directory / "metrics.jsonl")
        self._losses: dict[int, float] = {}

    @property
    def behind(self) -> bool:
        return self._log.behind

    def read_on(self) -> None:
        """Take in the next MiB. Raises OSError where the file cannot be read."""
        anew, lines = self._log.more()
        if anew:
            self._losses = {}
        for line in lines:
            try:
                found = from_json(_LossLine, line)
            except ValueError:
                continue
            self._losses[found.step] = _number(found.loss)
        if len(self._losses) > 8 * TRACE_PIXELS:
            self._losses = {int(step): loss for step, loss in self.points}

    @property
    def points(self) -> list[Point]:
        """(step, loss) of what can be seen."""
        return thinned([(float(step), loss) for step, loss in sorted(self._losses.items())], TRACE_PIXELS)


class FollowedRun:
    """The logs of one run, from which its page is drawn. ``trained_s``: the seconds of all steps; ``skipped``: how many
    steps were."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._metrics, self._events = FollowedLog(directory / "metrics.jsonl"), FollowedLog(directory / "events.jsonl")
        self._begin_metrics()
        self._begin_events()

    def _begin_metrics(self) -> None:
        self._rows: dict[int, Mapping[str, Any]] = {}
        self._unread: list[str] = []
        self._lines, self.trained_s, self.skipped = 0, 0.0, 0

    def _begin_events(self) -> None:
        self._validations: dict[int, Mapping[str, Any]] = {}
        self._told: deque[Mapping[str, Any]] = deque(maxlen=MOST_EVENTS)

    @property
    def behind(self) -> bool:
        return self._metrics.behind or self._events.behind

    def read_on(self) -> None:
        """Take in the next MiB of each log. Raises OSError where one cannot be read."""
        anew, lines = self._metrics.more()
        if anew:
            self._begin_metrics()
        for line in lines:
            self._add_row(line)
        if len(self._rows) > 48 * PAGE_PIXELS:
            self._rows = _thinned_rows(self._rows)
        anew, lines = self._events.more()
        if anew:
            self._begin_events()
        for line in lines:
            self._add_event(line)
        if len(self._validations) > 8 * PAGE_PIXELS:
            found = sorted(self._validations.items())
            points = [(float(step), _number(event["nats_per_token"] or event["loss"])) for step, event in found]
            self._validations = {int(step): self._validations[int(step)] for step, _ in thinned(points, PAGE_PIXELS)}

    def history(self) -> History:
        """The run as far as it has been read, with as many of its rows as its pictures show. Raises MissingInputError
        (CFG011) where it is gone."""
        events = [*self._validations.values(), *self._told]
        return history_of(self.directory, self._rows, events, self._unread)

    def report(self, history: History) -> Report:
        """As much of a report as the logs of a run that has not ended tell, beside what its plan says."""
        last, estimate = max(history.rows, default=0), Estimate()
        with suppress(OSError, ShardwiseError):
            estimate = load_plan(self.directory / "plan.yaml").estimate
        tokens = history.rows[last]["tokens"] or 0 if last else 0
        typical_s = history.typical("seconds") or 0.0
        return Report(self.directory, last, tokens, self.trained_s, typical_s, estimate, skipped=self.skipped)

    def _add_row(self, line: bytes) -> None:
        self._lines += 1
        try:
            row = vars(from_json(StepLine, line))
        except ValueError:
            if len(self._unread) < MOST_UNREAD:
                self._unread.append(f"{self._metrics.path}:{self._lines}")
            return
        self._rows[row["step"]] = row
        self.trained_s += row["seconds"] or 0.0
        self.skipped += row["skipped"]

    def _add_event(self, line: bytes) -> None:
        try:
            event = vars(from_json(EventLine, line))
        except ValueError:
            return
        if event["event"] == "validation":
            self._validations[event["step"]] = event
        elif event["event"] not in ORDINARY:
            self._told.append(event)


def _thinned_rows(rows: Mapping[int, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """What the pictures and tables of a page show of ``rows``: the last, those that a curve has left when it is
    thinned, and the last that were skipped."""
    steps = sorted(rows)
    kept = {steps[-1], *[step for step in steps if rows[step]["skipped"]][-MOST_SKIPPED:]}
    for key in CURVES:
        points = [(float(step), _number(rows[step][key])) for step in steps]
        kept |= {int(step) for step, _ in thinned(points, PAGE_PIXELS)}
    return {step: rows[step] for step in steps if step in kept}


def _number(value: float | None) -> float:
    """A measured value; NaN where the file has null, for a value that was not finite."""
    return math.nan if value is None else value
