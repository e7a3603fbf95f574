"""What a run's directory holds, finished or not: its recipe, a line per step, and events."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from shardwise.errors import MissingInputError, Problem
from shardwise.spec.document import read
from shardwise.spec.files import NOTE_BYTES, read_regular, regular_lines
from shardwise.spec.keys import dotted
from shardwise.spec.recipe import Recipe

WARM_UP_STEPS = 3
"""How many steps after each start do not count for speed: measurements slow them down."""
Point = tuple[int, float]


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
    """Lines that cannot be read, as ``path:number``."""

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
        """What validation measures: nats per token, or the loss for pairs of answers."""
        return "loss" if self.recipe.get("method.name") == "dpo" else "nats_per_token"

    @property
    def finished(self) -> bool:
        return any(event["step"] >= max(self.rows, default=0) for event in self._of("end"))

    @property
    def ranks(self) -> int | None:
        """What the run's last start recorded; None if it has not started."""
        return next((int(event["ranks"]) for event in reversed(list(self._of("start")))), None)

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
    if not (directory / "recipe.yaml").is_file():
        what = f"{directory} is not a run: it holds no recipe.yaml"
        fix = "name run directories, such as runs/quickstart-1"
        raise MissingInputError(Problem("CFG011", what, str(directory), fix))
    recipe = dotted(Recipe().model_dump()) | dotted(read(directory / "recipe.yaml").data or {})
    unread: list[str] = []
    metrics = _records(directory / "metrics.jsonl", lambda record: {**record, "step": int(record["step"])}, unread)
    events = _records(directory / "events.jsonl", lambda record: {**record, "event": str(record["event"])}, unread)
    rows = {record["step"]: record for record in metrics}
    measured, identity = _measured(directory / "report.md"), _identity(directory / "run.json")
    return History(directory, recipe, rows, tuple(events), measured, identity, tuple(unread))


def _records(path: Path, accept: Callable[[Any], dict[str, Any]], unread: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    found = []
    try:
        for number, line in enumerate(regular_lines(path), 1):
            try:
                found.append(accept(json.loads(line)))
            except (ValueError, KeyError, TypeError):
                if line.endswith(b"\n"):  # else it is still being written
                    unread.append(f"{path}:{number}")
    except OSError as error:
        unread.append(f"{path} ({error.strerror})")
    return found


def _identity(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(path, NOTE_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


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
