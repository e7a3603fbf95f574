"""The pages of a board: all runs of a directory, and one run, from their files as they are when somebody looks."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter, OrderedDict
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from urllib.parse import quote, unquote

from shardwise.cli.board_server import BoardAnswer
from shardwise.cli.runs import HEADS, Row, cells, damaged, glance, planned_steps, runs_in, size_of
from shardwise.errors import ShardwiseError, first_line
from shardwise.pages.charts import small_curve
from shardwise.pages.page import Chapter, Listing, Marked, Paragraphs, Part, Table, WebPage, link
from shardwise.runtime.checkpoint.manifest import train_again
from shardwise.runtime.report.answer_tables import TaskTable, answer_tables
from shardwise.runtime.report.followed import FollowedRun, LossTrace
from shardwise.runtime.report.report import Report, read_report
from shardwise.runtime.report.report_page import report_page
from shardwise.runtime.report.run_files import History
from shardwise.spec.units import counted

FIRST_S, READ_S = 0.4, 1.0
"""How long a page's first request, and each later one, reads what is new; what is left is read by the next."""
KEPT_S = 0.5
"""For how long a page is shown again as it was."""
SOON_S, LIVE_S, QUIET_S = 1, 5, 30
"""After how many seconds a browser asks again: while files are still being read, while a run goes on, and else."""
LOOK_AGAIN_S, SIZE_AGAIN_S = 30.0, 600.0
"""How long the state of a run that does not change is believed, and its size; of one that goes on its size is found
again as often as the state of others."""
MOST_RUNS = 500
"""So many are shown, the newest."""
MOST_FOLLOWED = 4
"""Of so many runs, those whose pages were asked for last, what their pages need is kept."""
MOST_STATE = 40
"""How many characters of a state the table has."""
LIVE, ENDED = ("running", "owned by"), {"finished": "good", "stopped": "close", "interrupted": "close"}
"""How states begin."""

Stamp = tuple[int, int, int]


class WatchedRun:
    """A run in the table: its row, and the curve of its loss. ``behind``: whether something of it is still unread."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.trace = directory, LossTrace(directory)
        self.row = Row(directory.name, "", None, None, None, None, 0.0, 0)
        self._stamps: tuple[Stamp, ...] = ()
        self._recipe: tuple[Stamp, int | None, str] | None = None
        self._looked_s = self._sized_s = -math.inf
        self._unreadable = False

    @property
    def live(self) -> bool:
        return self.row.state.startswith(LIVE)

    @property
    def behind(self) -> bool:
        recipe = self._recipe is None or self._recipe[0] != stamp(self.directory / "recipe.yaml")
        return recipe or (self.trace.behind and not self._unreadable)

    def look(self, now_s: float) -> None:
        """Bring the row up to date with the ends of files. Raises OSError where the run is gone."""
        stamps = tuple(stamp(path) for path in (self.directory, self.directory / "metrics.jsonl"))
        if stamps == self._stamps and not self.live and now_s - self._looked_s < LOOK_AGAIN_S:
            return
        if stamps != self._stamps:
            self._unreadable, self._sized_s = False, self._sized_s if self.live else -math.inf
        row = glance(self.directory)
        _, of, damage = self._recipe or ((), None, "")
        self.row = replace(row, of=of, state=damage or row.state, bytes=self.row.bytes)
        self._stamps, self._looked_s = stamps, now_s

    def read_curve(self, until_s: float) -> None:
        """Read what was added to the metrics, until then."""
        try:
            self.trace.read_on()
            while self.trace.behind and time.monotonic() < until_s:
                self.trace.read_on()
        except OSError:
            self._unreadable = True  # as its state says

    def read_rest(self) -> None:
        """Read the recipe, and the sizes of files."""
        recipe = stamp(self.directory / "recipe.yaml")
        if self._recipe is None or self._recipe[0] != recipe:
            self._recipe = recipe, *_steps_of(self.directory)
            self.row = replace(self.row, of=self._recipe[1], state=self._recipe[2] or self.row.state)
        if time.monotonic() - self._sized_s > (LOOK_AGAIN_S if self.live else SIZE_AGAIN_S):
            with suppress(OSError):
                self.row = replace(self.row, bytes=size_of(self.directory))
            self._sized_s = time.monotonic()


def stamp(path: Path) -> Stamp:
    """What changes when a file does; zeros where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns


def _steps_of(directory: Path) -> tuple[int | None, str]:
    """The recipe's train.max_steps, and what is damaged."""
    try:
        return planned_steps(directory), ""
    except (ShardwiseError, OSError) as error:
        return None, damaged(error)


@dataclass(frozen=True)
class _KeptPage:
    """A page that was made at this time, of a run with this ``row`` and files with these ``stamps``."""

    answer: BoardAnswer
    row: Row | None
    stamps: tuple[Stamp, ...]
    made_s: float


class BoardPages:
    """The pages of the runs in ``path``. One request at a time is answered; others wait, and get the same."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._runs: dict[str, WatchedRun] = {}
        self._followed: OrderedDict[str, FollowedRun] = OrderedDict()
        self._kept: OrderedDict[str, _KeptPage] = OrderedDict()
        self._lock = threading.Lock()

    def answer(self, rest: str) -> BoardAnswer | None:
        """The page of what an address has after the token; None where there is none: a run is looked up by its name
        among those that were found."""
        with self._lock:
            kept = self._kept.get(rest)
            if kept and time.monotonic() - kept.made_s < KEPT_S:
                return kept.answer
            until_s = time.monotonic() + (READ_S if kept else FIRST_S)
            if not rest:
                return self._keep("", self._overview(until_s))
            folder, _, name = rest.partition("/")
            name = unquote(name, errors="surrogateescape")
            if name not in self._runs:
                self._find()
            run = self._runs.get(name) if folder == "run" else None
            return self._page(rest, name, run, until_s) if run else None

    def _keep(
        self, rest: str, answer: BoardAnswer, row: Row | None = None, stamps: tuple[Stamp, ...] = ()
    ) -> BoardAnswer:
        self._kept[rest] = _KeptPage(answer, row, stamps, time.monotonic())
        self._kept.move_to_end(rest)
        while len(self._kept) > MOST_FOLLOWED:
            self._kept.popitem(last=False)
        return answer

    def _find(self) -> list[WatchedRun]:
        """The runs that are there now, the newest first."""
        directories: list[Path] = []
        with suppress(ShardwiseError, OSError):
            directories = runs_in(self.path)
        known, self._runs = self._runs, {}
        for directory in directories:
            name = (directory if directory != self.path else directory.resolve()).name
            run = known.get(name) or WatchedRun(directory)
            with suppress(OSError):  # else it has just gone
                run.look(time.monotonic())
                self._runs[name] = run
        return sorted(self._runs.values(), key=lambda run: -run.row.changed_s)

    def _overview(self, until_s: float) -> BoardAnswer:
        runs = self._find()
        shown = runs[:MOST_RUNS]
        for run in takewhile(lambda _: time.monotonic() < until_s, shown):
            run.read_curve(until_s)
        for run in takewhile(lambda _: time.monotonic() < until_s, shown):  # of 200 runs these take longest
            run.read_rest()
        behind = sum(run.behind for run in shown)
        states = Counter(run.row.state.partition(",")[0].partition(":")[0].partition(" by")[0] for run in runs)
        told = ", ".join(f"{number:,} {state}" for state, number in states.items())
        facts = [f"{counted(behind, 'run')} still to be read"] * bool(behind)
        facts += [f"the newest {MOST_RUNS:,} are shown"] * (len(runs) > MOST_RUNS)
        rows = [self._line(run) for run in shown]
        live = frozenset(number for number, run in enumerate(shown) if run.live)
        name, state, step, loss, *others = HEADS
        table = Table((name, state, step, loss, "", "tokens/s", *others), rows, "<<>><>>>>", "", live)
        part: Part = table if rows else Paragraphs([f"no runs in {self.path}"])
        verdict = f"{counted(len(runs), 'run')}" + (f": {told}" if told else "")
        page = WebPage(f"Runs in {self.path}", verdict, [Chapter("Runs", [part])], facts=facts, kind="board")
        return _answer(page, SOON_S if behind else LIVE_S if live else QUIET_S)

    def _line(self, run: WatchedRun) -> tuple[str, ...]:
        name, state, step, loss, saved, age, size = cells(run.row)
        place = run.directory if run.directory != self.path else run.directory.resolve()
        to = link(f"run/{quote(os.fsencode(place.name), safe='')}", name)
        state = state if len(state) <= MOST_STATE else f"{state[:MOST_STATE]}..."
        speed = "-" if run.row.tokens_per_s is None else f"{run.row.tokens_per_s:,.0f}"
        curve = Marked(small_curve(f"Loss of {name}", run.trace.points))
        return to, state, step, loss, curve, speed, saved, age, size if run.row.bytes else "-"

    def _page(self, rest: str, name: str, run: WatchedRun, until_s: float) -> BoardAnswer | None:
        with suppress(OSError):
            run.look(time.monotonic())
        run.read_rest()
        followed = self._followed.setdefault(name, FollowedRun(run.directory))
        self._followed.move_to_end(name)
        while len(self._followed) > MOST_FOLLOWED:
            self._followed.popitem(last=False)
        files = ("", "metrics.jsonl", "events.jsonl", "recipe.yaml", "plan.yaml", "report.json", "answers")
        stamps, kept = tuple(stamp(run.directory / file) for file in files), self._kept.get(rest)
        if kept and (kept.row, kept.stamps) == (run.row, stamps) and not followed.behind:
            return self._keep(rest, kept.answer, run.row, stamps)
        unreadable = ""
        try:
            followed.read_on()
            while followed.behind and time.monotonic() < until_s:
                followed.read_on()
            page = page_of_run(run.row, followed)
        except (ShardwiseError, OSError) as error:
            unreadable, page = damaged(error), WebPage(f"Run {name}", damaged(error), [], "bad", kind="run")
        behind = followed.behind and not unreadable
        facts = [link("../", f"all runs in {self.path}"), *["still being read"] * behind, *page.facts]
        again_s = SOON_S if behind else LIVE_S if run.live else QUIET_S
        return self._keep(rest, _answer(replace(page, facts=facts), again_s), run.row, stamps)


def _answer(page: WebPage, again_s: int) -> BoardAnswer:
    """A page as bytes; names of files need not be text."""
    return BoardAnswer(page.html().encode("utf-8", "replace"), again_s)


def page_of_run(row: Row, followed: FollowedRun) -> WebPage:
    """The report's page of a run, finished or not. Raises ShardwiseError or OSError where it cannot be read."""
    history, directory = followed.history(), followed.directory
    report, tables = _report(row, followed, history), _tables(directory)
    page = report_page(report, history, tables)
    name, state, step, loss, *_ = cells(row)
    verdict = f"{state}: step {step}, loss {loss}"
    facts = [page.verdict, *page.facts]
    if history.unread:
        facts.append(f"cannot be read and is left out: {', '.join(history.unread)}")
    tone = next((tone for begin, tone in ENDED.items() if state.startswith(begin)), "bad")
    tone = "" if state.startswith(LIVE) else page.tone if tone == "good" else tone
    sections = [*page.sections]
    if not state.startswith("finished"):
        sections = [section for section in sections if section.title != "Next"]
        again = [Listing("What to type", train_again(directory))] * (not state.startswith(LIVE))
        sections += [Chapter("Next", again)] * bool(again)
    return replace(page, title=f"Run {name}", verdict=verdict, facts=facts, tone=tone, sections=sections)


def _report(row: Row, followed: FollowedRun, history: History) -> Report:
    """What the run wrote when it had finished; else as much of it as its logs tell."""
    if row.state.startswith("finished"):
        with suppress(OSError, ShardwiseError):
            if (report := read_report(followed.directory)).steps == max(history.rows, default=0):
                return replace(report, directory=followed.directory)
    return followed.report(history)


def _tables(directory: Path) -> list[TaskTable]:
    """The answers to the run's tasks; none where they cannot be read. Of files that are as before, as they were read
    before."""
    files = sorted((directory / "answers").glob("*/step-*.jsonl"))
    return _tables_of(directory, tuple((str(file), stamp(file)) for file in files))


@lru_cache(maxsize=MOST_FOLLOWED)
def _tables_of(directory: Path, stamps: tuple[tuple[str, Stamp], ...]) -> list[TaskTable]:
    try:
        return answer_tables(directory)
    except (OSError, ValueError, KeyError, ZeroDivisionError, TypeError) as error:
        return [TaskTable(f"answers that cannot be read: {first_line(error)}", ["step", "score"], [])]
