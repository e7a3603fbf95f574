"""The contents of a run's directory, finished or not: its recipe, a line per step, and events."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import FiniteFloat

from shardwise.errors import MissingInputError, Problem, ShardwiseError
from shardwise.spec.document import read
from shardwise.spec.files import NOTE_BYTES, read_regular, regular_lines
from shardwise.spec.keys import dotted
from shardwise.spec.methods import METHODS
from shardwise.spec.recipe import Recipe
from shardwise.spec.record import Count, Numbered, from_json

WARM_UP_STEPS = 3
"""How many steps after each start do not count for speed: measurements slow them down."""
Point = tuple[float, float]
PLANNED_AGAIN = "planned again"
"""The event of a run that ran out of memory and went on with another plan."""
NODES_CHANGED = "nodes changed"
"""The event of a run that lost nodes or took some in, and went on with those that are there."""
SLOW_RANK = "slow rank"
"""The event of a rank for which all others wait."""


@dataclass(frozen=True)
class StepLine(Numbered):
    """The part of a line of metrics.jsonl that is compared or drawn; null is a value that was not finite."""

    tokens: Count | None = None
    loss: FiniteFloat | None = None
    tokens_per_s: FiniteFloat | None = None
    seconds: FiniteFloat | None = None
    mfu: FiniteFloat | None = None
    memory_bytes: Count | None = None
    grad_norm: FiniteFloat | None = None
    learning_rate: FiniteFloat | None = None
    skipped: bool = False
    reason: str = ""


@dataclass(frozen=True)
class EventLine:
    """The part of a line of events.jsonl that is compared or told."""

    event: str
    time_s: FiniteFloat | None = None
    what: str = ""
    device: str = ""
    step: Count = 0
    ranks: Count | None = None
    loss: FiniteFloat | None = None
    nats_per_token: FiniteFloat | None = None


@dataclass(frozen=True)
class History:
    """One run. ``recipe`` maps every key, dotted, to its value; ``rows`` are the lines of metrics.jsonl by step;
    ``identity`` is run.json, empty where it cannot be read."""

    directory: Path
    recipe: Mapping[str, Any]
    rows: Mapping[int, Mapping[str, Any]]
    events: tuple[Mapping[str, Any], ...]
    report: Mapping[str, str]
    identity: Mapping[str, Any]
    unread: tuple[str, ...] = ()
    """Lines that cannot be read, as ``path:number``, and whole files, as ``path``."""

    @cached_property
    def losses(self) -> dict[int, float]:
        """The loss by step; finite losses only."""
        return {step: row["loss"] for step, row in self.rows.items() if math.isfinite(_number(row, "loss"))}

    @cached_property
    def validation(self) -> list[Point]:
        """(step, ``measure``) of every validation; where a step was repeated after a restart, its last one."""
        return sorted({e["step"]: _number(e, self.measure) for e in self._of("validation")}.items())

    @property
    def measure(self) -> str:
        """The measure of validation: nats per token, or the loss for pairs of answers."""
        method = METHODS.get(self.recipe.get("method.name", ""))
        return "loss" if method and method.pairs else "nats_per_token"

    @property
    def finished(self) -> bool:
        return any(event["step"] >= max(self.rows, default=0) for event in self._of("end"))

    @property
    def ranks(self) -> int | None:
        """The number of ranks that the run's last start recorded; None if it has not started."""
        return next((event["ranks"] for event in reversed(list(self._of("start")))), None)

    def curve(self, key: str) -> list[Point]:
        """(step, value) of every line, in the order of steps; NaN where the file has no number."""
        return [(float(step), _number(self.rows[step], key)) for step in sorted(self.rows)]

    @cached_property
    def warm_up(self) -> set[int]:
        """The first steps after each start."""
        return {event["step"] + n for event in self._of("start") for n in range(1, WARM_UP_STEPS + 1)}

    def typical(self, key: str) -> float | None:
        """The median over the steps."""
        rows = [self.rows[step] for step in sorted(self.rows)]
        rows = rows[WARM_UP_STEPS:] or rows
        return median(found) if (found := [row[key] for row in rows if row.get(key) is not None]) else None

    def highest(self, key: str) -> float | None:
        return max((row[key] for row in self.rows.values() if row.get(key) is not None), default=None)

    def _of(self, kind: str) -> Iterator[Mapping[str, Any]]:
        return (event for event in self.events if event["event"] == kind)


def read_history(directory: Path) -> History:
    """The run in ``directory``. Raises MissingInputError (CFG011) where none is. Lines that cannot be read are left
    out, and named unless it is the last one, which may still be being written."""
    unread: list[str] = []
    rows = {record["step"]: record for record in _records(directory / "metrics.jsonl", StepLine, unread)}
    events = _records(directory / "events.jsonl", EventLine, unread)
    return history_of(directory, rows, events, unread)


def history_of(
    directory: Path, rows: Mapping[int, Mapping[str, Any]], events: Sequence[Mapping[str, Any]], unread: Sequence[str]
) -> History:
    """The run in ``directory`` with these ``rows`` by step and ``events``, and what its other files say. ``unread``:
    what of the two logs cannot be read. Raises MissingInputError (CFG011) where no run is."""
    if not (directory / "recipe.yaml").is_file():
        what = f"{directory} is not a run: it holds no regular file recipe.yaml"
        fix = "name run directories, such as runs/quickstart-1"
        raise MissingInputError(Problem("CFG011", what, str(directory), fix))
    found = list[str]()
    recipe = dotted(Recipe().model_dump()) | dotted(_settings(directory / "recipe.yaml", found))
    found += unread
    measured, identity = _measured(directory / "report.md"), _identity(directory / "run.json", found)
    return History(directory, recipe, rows, tuple(events), measured, identity, tuple(found))


def since_begun(directory: Path) -> list[dict[str, Any]]:
    """Return the events of the run in this directory since it last began from nothing, whatever was there before. What
    begins anew because memory ran out is the same run."""
    events = _records(directory / "events.jsonl", EventLine, [])
    begun = 0
    for place, event in enumerate(events):
        again = place > 0 and events[place - 1]["event"] in (PLANNED_AGAIN, NODES_CHANGED)
        if event["event"] == "start" and event["step"] == 0 and not again:
            begun = place
    return events[begun:]


def remarkable(directory: Path) -> list[str]:
    """Return for each time that the run was planned again or its nodes changed when and why, and what then differed;
    and its slow ranks."""
    told = (one for one in since_begun(directory) if one["event"] in (PLANNED_AGAIN, NODES_CHANGED, SLOW_RANK))
    return [f"{one['event'].capitalize()} at step {one['step']:,}: {one['what']}." for one in told]


def _settings(path: Path, unread: list[str]) -> dict[str, Any]:
    with suppress(ShardwiseError):
        if isinstance(found := read(path).data or {}, dict):
            return found
    unread.append(str(path))
    return {}


def _records(path: Path, kind: type[object], unread: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    found: list[dict[str, Any]] = []
    try:
        for number, line in enumerate(regular_lines(path), 1):
            try:
                found.append(vars(from_json(kind, line)))
            except ValueError:
                if line.endswith(b"\n"):  # else it is still being written
                    unread.append(f"{path}:{number}")
    except OSError as error:
        unread.append(f"{path} ({error.strerror})")
    return found


def _identity(path: Path, unread: list[str]) -> dict[str, Any]:
    try:
        return from_json(dict[str, Any], read_regular(path, NOTE_BYTES))
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        unread.append(str(path))
    return {}


def _number(record: Mapping[str, Any], key: str) -> float:
    """A measured value; NaN where the file has null, for a value that was not finite."""
    value = record.get(key)
    return math.nan if value is None else float(value)


def _measured(path: Path) -> dict[str, str]:
    """The measured values of report.md: the third column of its table."""
    try:
        lines = read_regular(path, NOTE_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return {}
    rows = [line.strip("| ").split(" | ") for line in lines if line[:2] == "| "]
    return {row[0]: row[2].strip() for row in rows if len(row) > 2 and row[0] and not row[0].startswith("|")}
