"""What the files of runs tell, as parts of a page: curves over steps, of one run or of several in the same plots, and
the events of one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from math import isfinite

from shardwise.pages.charts import Picture, Point, lines
from shardwise.pages.page import Part, Table
from shardwise.runtime.report.run_files import History

CURVES = {
    "loss": ("Loss", "nats", 1.0),
    "grad_norm": ("Gradient norm", "norm", 1.0),
    "learning_rate": ("Learning rate", "learning rate", 1.0),
    "tokens_per_s": ("Throughput", "tokens/s", 1.0),
    "seconds": ("Time of a step", "seconds", 1.0),
    "memory_bytes": ("Memory of rank 0", "GiB", 2.0**30),
}
"""By the key of metrics.jsonl: the title of a picture, its unit, and how many of the file's units one of its has."""
MEASURED_MEMORY = "on a GPU what torch allocates at its peak; on a CPU all that the process takes"
"""What the curve of memory is of, which metrics.jsonl does not say."""
UNSETTLED = {"grad_norm", "tokens_per_s", "seconds"}
"""The keys of which a run's first steps after a start tell nothing typical: they compile and measure, and gradients
are large."""
ORDINARY = {"validation", "task", "checkpoint committed", "checkpoint removed"}
"""Events of which a page tells nothing: figures are in its curves and tables."""
MOST_EVENTS, MOST_SKIPPED = 200, 50


def curves(runs: Mapping[str, History], beside: Mapping[str, Mapping[str, float]] | None = None) -> list[Picture]:
    """A picture for each of ``CURVES``, with a line for each run by its name, and of the loss one more for its
    validation. ``beside``: by key, other values by name, which a level line stands for."""
    found = []
    for key, (title, unit, scale) in CURVES.items():
        series, odd = dict[str, list[Point]](), dict[str, set[int]]()
        for name, run in runs.items():
            one = name if len(runs) > 1 else "training" if key == "loss" else "measured"
            series[one] = [(step, value / scale) for step, value in run.curve(key)]
            odd[one] = run.warm_up if key in UNSETTLED and {*run.rows} - run.warm_up else set()
        for name, run in runs.items() if key == "loss" else ():
            if len(points := [*run.validation]):
                series[f"{name}, validation" if len(runs) > 1 else "validation"] = points
        steps = [step for points in series.values() for step, _ in points]
        for name, value in (beside or {}).get(key, {}).items():
            if steps and isfinite(value):
                series[name] = [(min(steps), value / scale), (max(steps), value / scale)]
        picture = lines(title, ("step", unit), series, odd)
        found.append(replace(picture, note=MEASURED_MEMORY) if key == "memory_bytes" else picture)
    return found


def events(history: History) -> list[Part]:
    """Return a table of starts and faults, and one of the steps that were skipped."""
    rows = []
    for event in [one for one in history.events if one["event"] not in ORDINARY][-MOST_EVENTS:]:
        when = ""
        if event["time_s"] is not None:
            with suppress(ValueError, OverflowError, OSError):  # not a time that a calendar has
                when = f"{datetime.fromtimestamp(event['time_s'], UTC):%F %T} UTC"
        ranks = f"{event['ranks']} ranks" if event["ranks"] else ""
        rows.append((when, event["event"], f"{event['step']:,}", event["what"] or ranks))
    parts: list[Part] = [Table(("when", "what", "step", ""), rows, "<<><", "Events")]
    skipped = [(f"{step:,}", row["reason"]) for step, row in sorted(history.rows.items()) if row.get("skipped")]
    if skipped:
        title = "Skipped steps" + f", the last {MOST_SKIPPED}" * (len(skipped) > MOST_SKIPPED)
        parts.append(Table(("step", "why"), skipped[-MOST_SKIPPED:], "><", title))
    return parts
