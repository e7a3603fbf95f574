"""``report.html`` of a run that goes on: written after each checkpoint, from the logs as far as they have come."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shardwise.data.whole import write_whole
from shardwise.pages.page import Chapter, Listing, WebPage
from shardwise.runtime.checkpoint.manifest import train_again
from shardwise.runtime.report.answer_tables import answer_tables
from shardwise.runtime.report.followed import FollowedRun
from shardwise.runtime.report.report_page import REPORT_PAGE, report_page
from shardwise.runtime.report.warn import only_reports

SHARE = 0.01
"""The share of a run's time that its pages may take. Of checkpoints that follow one another sooner some have none."""
READ_S = 1.0
"""How long each checkpoint reads at most: a long run that is resumed has its first page some checkpoints later."""


class InterimPage:
    """The page of the run in ``directory``, which is to have so many steps; ``say`` tells what failed. What has been
    read of the logs is kept, so that a page takes the time of its own steps."""

    def __init__(self, directory: Path, max_steps: int, say: Callable[[str], None]) -> None:
        self.max_steps, self.say = max_steps, say
        self._followed = FollowedRun(directory)
        self._next_s = -math.inf

    def write(self) -> None:
        """Write it, unless the last one was written just now. An error is told, and ends nothing."""
        begun_s = time.monotonic()
        if begun_s < self._next_s:
            return
        with only_reports(REPORT_PAGE, self.say):
            self._followed.read_on()
            while self._followed.behind and time.monotonic() - begun_s < READ_S:
                self._followed.read_on()
            if not self._followed.behind:
                write_whole(self._followed.directory / REPORT_PAGE, self._page().html())
        ended_s = time.monotonic()
        self._next_s = ended_s + (ended_s - begun_s) / SHARE

    def _page(self) -> WebPage:
        history, directory = self._followed.history(), self._followed.directory
        report = self._followed.report(history)
        page = report_page(report, history, answer_tables(directory))
        so_far = (
            f"So far {report.steps:,} of {self.max_steps:,} steps: written beside a checkpoint, and again at the end."
        )
        again = Chapter("Next", [Listing("What to type if it ends before", train_again(directory))])
        sections = [*(one for one in page.sections if one.title != "Next"), again]
        return replace(page, verdict=so_far, facts=[page.verdict, *page.facts], tone="", sections=sections)
