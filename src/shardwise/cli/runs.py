"""``shardwise runs``: the runs of a directory and their states."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import FiniteFloat
from typer import Argument

from shardwise.cli.job_kind import More, On, kind_of_job, words_of
from shardwise.cli.options import Common
from shardwise.cli.show import print_json, say
from shardwise.errors import MissingInputError, Problem, ShardwiseError
from shardwise.launch.jobs.client import listed
from shardwise.launch.rundir import newest_step
from shardwise.runtime import owner
from shardwise.runtime.faults.outcome import NAME, read_exit
from shardwise.spec.files import open_regular
from shardwise.spec.load import load_recipe
from shardwise.spec.record import Count, from_json
from shardwise.spec.units import columns, show_age, show_bytes

_TAIL_BYTES = 65536
"""How many bytes at the end of metrics.jsonl are read for its last line."""


@dataclass
class Options(Common):
    """List the runs of a directory, the newest first: state, step, loss, age and size.

    With --on: the jobs that were submitted there, with their steps where the directory can be read from here.
    """

    path: Annotated[Path, Argument(metavar="[DIRECTORY]", help="The directory that holds the runs.")] = Path("runs")
    on: On = None
    more: More = ""


HEADS = ("run", "state", "step", "loss", "saved", "last step", "size")
"""Of :func:`cells`."""


@dataclass(frozen=True)
class Row:
    """One run. ``step`` is the last that was done, ``of`` the recipe's train.max_steps, ``saved`` the newest
    checkpoint; ``changed_s`` the time of the last line of its metrics."""

    name: str
    state: str
    step: int | None
    of: int | None
    loss: float | None
    saved: int | None
    changed_s: float
    bytes: int
    tokens_per_s: float | None = None


@dataclass(frozen=True)
class _Last:
    """The part of a line of metrics.jsonl that is shown."""

    step: Count | None
    loss: FiniteFloat | None = None
    tokens_per_s: FiniteFloat | None = None


def run(options: Options) -> None:
    """Print the table."""
    if options.on is not None:
        return _submitted(options)
    rows = [look(directory) for directory in runs_in(options.path)]
    rows.sort(key=lambda row: -row.changed_s)
    if options.json:
        return print_json([asdict(row) for row in rows])
    if not rows:
        return say(f"no runs in {options.path}")
    say(*columns([HEADS, *map(cells, rows)], "<<<<<<<"))
    return None


def runs_in(path: Path) -> list[Path]:
    """The directories of the runs in ``path``, or ``path`` itself where it is a run's own. Raises MissingInputError
    (CFG011)."""
    if not path.is_dir():
        what, fix = f"no directory {path}", "the directory that the runs are in: what was `--out` of theirs"
        raise MissingInputError(Problem("CFG011", what, str(path), fix))
    alone = (path / "recipe.yaml").is_file()
    return [found.parent for found in path.glob("recipe.yaml" if alone else "*/recipe.yaml")]


def _submitted(options: Options) -> None:
    """Print what a scheduler knows of its jobs, and their runs' directories of them."""
    client, rows = kind_of_job(options.on).client, []
    there: dict[str, list[Path]] = {}
    for path in options.path.glob("*/recipe.yaml"):
        there.setdefault(client.name_of(path.parent.name), []).append(path.parent)
    for job in listed(client, options.path, words_of(options.more)):
        mine = there.get(job.name, [])
        directory = mine[0] if len(mine) == 1 else None  # of several with one label it may be either's
        row, outcome = (look(directory), read_exit(directory)) if directory else (None, None)
        reason = outcome.message if outcome and job.ended and outcome.exit_code else job.reason
        rows.append({**asdict(job), "reason": reason, "run": row and asdict(row), "step": _step(row) if row else "-"})
    if options.json:
        return print_json(rows)
    names = ("name", "id", "state", "step", "reason")
    if not rows:
        return say(f"no jobs on {options.on}")
    cells = [("run", "job", *names[2:]), *(tuple(str(row[name]) for name in names) for row in rows)]
    return say(*columns(cells, "<<<<<"))


def look(directory: Path) -> Row:
    """The row of the run in ``directory``. Damage is reported as its state and never raises an error."""
    row, size = glance(directory), size_of(directory)
    try:
        of = planned_steps(directory)
    except (ShardwiseError, OSError) as error:
        return replace(row, state=damaged(error), bytes=size)
    return replace(row, of=of, bytes=size)


def glance(directory: Path) -> Row:
    """As :func:`look` but for what takes long: neither the recipe is read nor the size found."""
    metrics = directory / "metrics.jsonl"
    changed_s = (metrics if metrics.is_file() else directory / "recipe.yaml").stat().st_mtime
    last = _Last(None)
    saved = None
    try:
        state, last = _state(directory), _last(metrics)
        saved = newest_step(directory)
    except (ShardwiseError, OSError) as error:
        state = damaged(error)
    return Row(directory.resolve().name, state, last.step, None, last.loss, saved, changed_s, 0, last.tokens_per_s)


def damaged(error: ShardwiseError | OSError) -> str:
    """The state of a run of which something cannot be read."""
    return f"damaged: {error.problems[0].what if isinstance(error, ShardwiseError) else error}"


def planned_steps(directory: Path) -> int | None:
    """The recipe's train.max_steps. Raises ShardwiseError or OSError for a recipe that cannot be read."""
    return load_recipe(directory / "recipe.yaml").train.max_steps


def size_of(directory: Path) -> int:
    """The bytes of a run's files."""
    files = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(path.lstat().st_size for path in files if path.exists())


def _state(directory: Path) -> str:
    held, outcome = owner.holder(directory), read_exit(directory)
    if held is not None and held[1] is not False:
        return f"running, {held[0]}" if held[1] else f"owned by {held[0]}"
    if outcome is None:
        return f"damaged: {NAME} cannot be read" if (directory / NAME).exists() else "interrupted"
    names = {"done": "finished", "preempted": "stopped"}
    return names.get(outcome.kind, f"failed, {outcome.kind} (exit code {outcome.exit_code})")


def _last(metrics: Path) -> _Last:
    """The last whole line; of nothing where there is none."""
    if not metrics.is_file():
        return _Last(None)
    with open_regular(metrics) as file:
        file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines()
    for line in reversed(lines):
        with suppress(ValueError):
            return from_json(_Last, line)
    return _Last(None)


def cells(row: Row) -> tuple[str, ...]:
    """The row in words, as :data:`HEADS` names them."""
    loss = "-" if row.loss is None or not math.isfinite(row.loss) else f"{row.loss:.3f}"
    saved, changed = str(row.saved or "-"), show_age(time.time() - row.changed_s)
    return row.name, row.state, _step(row), loss, saved, changed, show_bytes(row.bytes)


def _step(row: Row) -> str:
    return "-" if row.step is None else f"{row.step:,}" + (f"/{row.of:,}" if row.of else "")
