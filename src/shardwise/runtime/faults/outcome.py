"""The outcome of a run: ``exit.json`` in the run directory, holding the first cause and not what followed from it.
Imports no torch: the launcher reads and writes it too."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from shardwise.errors import ShardwiseError
from shardwise.spec.files import NOTE_BYTES, read_regular
from shardwise.spec.record import Count, from_json

Kind = Literal["done", "preempted", "error", "crash", "memory", "hang", "peer_lost"]
NAME = "exit.json"


@dataclass(frozen=True)
class Exit:
    """``peer_lost`` marks a consequence: this rank failed because another one went away."""

    kind: Kind
    exit_code: Annotated[int, Field(ge=0, le=255)]
    message: str
    rank: Count = 0
    host: str = ""
    pid: Count = 0
    step: Count = 0
    phase: str = ""
    problems: list[dict[str, str]] = field(default_factory=list)
    restartable: bool = False
    time_s: FiniteFloat = 0.0


def failed(kind: Kind, error: ShardwiseError, rank: int) -> Exit:
    """Return the outcome of this process, a rank of the run, which ``error`` has ended."""
    problems, what = [asdict(problem) for problem in error.problems], error.problems[0].what
    return Exit(kind, error.exit_code, what, rank, socket.gethostname(), os.getpid(), problems=problems)


def write_exit(run_directory: Path, outcome: Exit) -> None:
    """Write ``exit.json``. The first cause wins; a consequence never replaces anything, a cause replaces a
    consequence, and what explains a crash replaces what the same process said of it before. Atomic, even if a process
    dies meanwhile."""
    target = run_directory / NAME
    draft = run_directory / f".{NAME}-{outcome.rank}-{os.getpid()}"
    standing = read_exit(run_directory)
    if standing is not None and explained_by(standing, outcome):
        outcome = replace(outcome, step=standing.step, phase=standing.phase)
    record = asdict(outcome) | {"time_s": outcome.time_s or time.time()}
    try:
        draft.write_text(json.dumps(record, indent=1) + "\n")
        standing = read_exit(run_directory)
        if standing is None:
            try:
                os.link(draft, target)
            except FileExistsError:
                standing = read_exit(run_directory)
                if standing is None:  # it is torn
                    os.replace(draft, target)
            except OSError:  # a file system without hard links
                os.replace(draft, target)
        if standing is not None and (explained_by(standing, outcome) or is_cause_of(standing, outcome)):
            os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def is_cause_of(standing: Exit, outcome: Exit) -> bool:
    """Return whether ``standing`` is a consequence, and ``outcome`` may be what it follows from."""
    return standing.kind == "peer_lost" and outcome.kind != "peer_lost"


def explained_by(standing: Exit, outcome: Exit) -> bool:
    """Return whether both are of one process, which could only say at first that it had crashed."""
    same = (standing.rank, standing.pid) == (outcome.rank, outcome.pid)
    return same and standing.kind == "crash" and not standing.problems and bool(outcome.problems)


def read_exit(run_directory: Path) -> Exit | None:
    """The outcome, or None while there is none that can be read."""
    try:
        return from_json(Exit, read_regular(run_directory / NAME, NOTE_BYTES))
    except (OSError, ValueError):
        return None


def clear_exit(run_directory: Path) -> None:
    """Forget the outcome of an earlier start."""
    (run_directory / NAME).unlink(missing_ok=True)
