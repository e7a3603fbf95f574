"""``report.html``: what report.md has, with the curves of the run."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.pages.charts import bars
from shardwise.pages.page import Chapter, Listing, Paragraphs, Part, Table, WebPage
from shardwise.runtime.report.answer_tables import TaskTable
from shardwise.runtime.report.curves import curves, events
from shardwise.runtime.report.report import Report
from shardwise.runtime.report.run_files import History
from shardwise.spec.units import show_bytes

REPORT_PAGE = "report.html"


def report_page(report: Report, history: History, tasks: Sequence[TaskTable]) -> WebPage:
    """The page of a run that has ended. ``tasks``: the answers to its tasks."""
    first, *facts = [line.replace("**", "") for line in report.told()]
    seconds = report.estimate.seconds
    predicted = {"seconds": {"predicted": seconds.step_s}} if seconds else {}
    samples = {"before": report.before, "after": report.after}
    told = [Listing(f"Sample {when} training", text) for when, text in samples.items() if text]
    answers = [Table(one.heads, one.rows, ">>" + "<" * (len(one.heads) - 2), one.task) for one in tasks]
    sections = [
        Chapter("Curves", curves({"run": history}, predicted)),
        Chapter("Predicted and measured", _measured(report)),
        *([Chapter("Samples and answers", [*told, *answers])] if told or answers else []),
        Chapter("Starts, faults and what was skipped", events(history)),
        Chapter("Next", [Listing("What to type", "\n".join(report.next_steps()))]),
    ]
    tone = "bad" if report.unsaved is not None else "close" if report.skipped else "good"
    return WebPage(f"Run {report.directory.name}", first, sections, tone, facts, "run")


def _measured(report: Report) -> list[Part]:
    table = Table(("", "predicted", "measured", "difference"), report.rows(), "<>>>")
    if report.memory is None:
        return [
            table,
            Paragraphs(["Memory is measured in the third step after a start, and told when the run ends."]),
        ]
    figures = report.memory_figures()
    rows = {
        "predicted": {what.removeprefix("memory: "): (predicted or 0) / 2**30 for what, predicted, _ in figures},
        "measured": {what.removeprefix("memory: "): measured / 2**30 for what, _, measured in figures},
    }
    title = "What torch allocates on a rank, predicted and measured"
    picture = bars(title, "GiB", rows, {}, lambda size: show_bytes(size * 2**30))
    resident = show_bytes(report.memory.resident_bytes)
    return [picture, table, Paragraphs([f"Memory is torch's allocations on rank 0; the process takes {resident}."])]
