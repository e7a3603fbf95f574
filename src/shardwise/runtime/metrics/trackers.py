"""Trackers: what metrics.jsonl holds, sent on rank 0 to tensorboard, wandb, mlflow or trackio as well.

Each tracker has a thread of its own, which imports it, too: one that is slow or unreachable must neither slow down a
step nor keep other ranks waiting until their collectives fail. One that fails causes one warning and is dropped;
training goes on. Imports no torch: the command line asks for missing packages before any process starts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import Queue
from typing import Any, Literal, Protocol

from shardwise.errors import Problem, UnavailableError
from shardwise.models.kernel_choice import FA3_PACKAGE
from shardwise.spec.files import NOTE_BYTES, read_regular
from shardwise.spec.recipe import Recipe

Outcome = Literal["finished", "stopped", "failed"]
Values = Mapping[str, float]
CLOSING_S = 30.0
"""How long the end of a run waits for its trackers; ranks that wait for rank 0 meanwhile give up after longer."""
PROJECT = "shardwise"
"""The project for trackers that need one and have no default."""


@dataclass(frozen=True)
class Subject:
    """The run that is tracked. ``first_step`` is the one it goes on from, ``config`` the recipe, dotted."""

    name: str
    run_id: str
    directory: Path
    first_step: int
    config: Mapping[str, Any]


class Tracker(Protocol):
    """Opened by its constructor; used by one thread only."""

    def row(self, step: int, values: Values) -> None:
        """Log ``values`` at ``step``."""

    def close(self, outcome: Outcome) -> None:
        """Take the run's outcome, which nothing follows."""


class TensorBoard:
    """Event files in the run's ``tensorboard/``. What a resumed run repeats replaces what was there."""

    def __init__(self, subject: Subject) -> None:
        from torch.utils.tensorboard import SummaryWriter

        repeated = subject.first_step + 1 if subject.first_step else None
        self._writer: Any = SummaryWriter(str(subject.directory / "tensorboard"), purge_step=repeated)
        lines = "\n".join(f"    {key}: {value}" for key, value in subject.config.items())
        self._writer.add_text("recipe", lines, subject.first_step)

    def row(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, outcome: Outcome) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases. Mode, project, directory and key come from its own variables (WANDB_MODE, WANDB_PROJECT)."""

    def __init__(self, subject: Subject) -> None:
        import wandb

        self._run: Any = wandb.init(
            name=subject.name, id=subject.run_id or None, resume="allow", config=dict(subject.config)
        )

    def row(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=int(outcome == "failed"))


class MLflow:
    """MLflow, where its own variables say (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME) or at its default. A run that
    is resumed goes on in the MLflow run whose id it has kept."""

    STATUS: Mapping[Outcome, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
    PARAMETERS_A_CALL, VALUE_CHARACTERS = 90, 500

    def __init__(self, subject: Subject) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        kept = subject.directory / "mlflow-run-id"
        if kept.exists():
            mlflow.start_run(run_id=read_regular(kept, NOTE_BYTES).decode().strip())
            return
        kept.write_text(mlflow.start_run(run_name=subject.name).info.run_id, encoding="utf-8")
        pairs = [(key, str(value)[: self.VALUE_CHARACTERS]) for key, value in subject.config.items()]
        for first in range(0, len(pairs), self.PARAMETERS_A_CALL):
            mlflow.log_params(dict(pairs[first : first + self.PARAMETERS_A_CALL]))

    def row(self, step: int, values: Values) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self, outcome: Outcome) -> None:
        self._mlflow.end_run(self.STATUS[outcome])


class Trackio:
    """Trackio, in its own directory or the Space that its variables name. It is told not to watch the machine: that
    would take another thread beside the training."""

    def __init__(self, subject: Subject) -> None:
        import trackio

        unwatched: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        run: dict[str, Any] = {"name": subject.name, "resume": "allow" if subject.first_step else "never"}
        self._run: Any = trackio.init(project=PROJECT, config=dict(subject.config), **run, **unwatched)

    def row(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish()


Kind = Callable[[Subject], Tracker]
KINDS: Mapping[str, Kind] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow, "trackio": Trackio}


class Feed:
    """One tracker and its thread. ``error`` is why it has ended early, if it has."""

    def __init__(self, name: str, kind: Kind, subject: Subject) -> None:
        self.name = name
        self.error: BaseException | None = None
        self._items: Queue[tuple[int, Values] | Outcome] = Queue()
        self._thread = threading.Thread(target=self._serve, args=(kind, subject), daemon=True, name=f"track-{name}")
        self._thread.start()

    def put(self, item: tuple[int, Values] | Outcome) -> None:
        """Hand over a row, or the outcome, which is the last; never waits."""
        if self.error is None:
            self._items.put(item)

    def wait(self, seconds: float) -> bool:
        """Wait for the thread for so many ``seconds``, and return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _serve(self, kind: Kind, subject: Subject) -> None:
        try:
            tracker = kind(subject)
            while not isinstance(item := self._items.get(), str):
                tracker.row(*item)
            tracker.close(item)
        except BaseException as error:
            self.error = error


class Tracks:
    """The trackers of a run; of none, on all ranks but the first."""

    def __init__(self, feeds: Sequence[Feed] = ()) -> None:
        self._feeds = list(feeds)

    def row(self, step: int, section: str, record: Mapping[str, Any]) -> None:
        """Log the numbers of ``record`` as ``section/<name>``."""
        numbers = {name: float(v) for name, v in record.items() if name != "step" and isinstance(v, (int, float))}
        values = {f"{section}/{name}": number for name, number in numbers.items()}
        for feed in self._feeds:
            feed.put((step, values))

    def complaints(self) -> list[str]:
        """A line for each tracker that has failed since the last call; it is dropped."""
        failed = {feed.name: _first_line(feed.error) for feed in self._feeds if feed.error is not None}
        self._feeds = [feed for feed in self._feeds if feed.name not in failed]
        return [f"warning[TRK002]: {name} failed and is not used any more: {why}" for name, why in failed.items()]

    def close(self, outcome: Outcome) -> list[str]:
        """Tell all trackers how the run ended and wait for them, CLOSING_S seconds in all; returns warnings."""
        for feed in self._feeds:
            feed.put(outcome)
        until = time.monotonic() + CLOSING_S
        late = [feed.name for feed in self._feeds if not feed.wait(max(0.0, until - time.monotonic()))]
        lines = self.complaints()
        self._feeds = []
        return lines + [f"warning[TRK002]: {name} has not finished within {CLOSING_S:.0f} s" for name in late]


def check_installed(recipe: Recipe) -> None:
    """Raises UnavailableError if ``run.trackers`` (TRK001) or ``attention`` (DEV003) asks for what is not there, or is
    there and broken."""
    if recipe.attention == "fa3" and find_spec(FA3_PACKAGE) is None:
        what = f"`attention: fa3` needs the package {FA3_PACKAGE} (FlashAttention 3), which is not installed here"
        raise UnavailableError(Problem("DEV003", what, "attention", "`attention=auto` uses what is installed"))
    missing = [name for name in recipe.run.tracker_names if find_spec(name) is None]
    if missing:
        what = f"`run.trackers` names {' and '.join(missing)}, not installed here"
        raise UnavailableError(Problem("TRK001", what, "run.trackers", f'pip install "shardwise[{",".join(missing)}]"'))
    for name in recipe.run.tracker_names:
        try:
            module = import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
            if name == "mlflow":  # without what a part of it lacks (mlflow-skinny), its default store cannot be opened
                module.MlflowClient()
        except Exception as error:  # whatever a package raises that is broken
            what = f"`run.trackers` names {name}, which does not work here: {_first_line(error)}"
            fix = f'pip install "shardwise[{name}]", or do what {name} says'
            raise UnavailableError(Problem("TRK001", what, "run.trackers", fix)) from error


def track(recipe: Recipe, subject: Subject) -> Tracks:
    """Open the trackers that the recipe names."""
    return Tracks([Feed(name, KINDS[name], subject) for name in recipe.run.tracker_names])


def _first_line(error: BaseException | None) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
