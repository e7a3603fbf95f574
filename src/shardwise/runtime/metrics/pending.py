"""Steps that are launched and whose figures are not yet read: each is logged a step late, while the device computes the
next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import NoReturn

from shardwise.data.stream import StepBatch
from shardwise.errors import TrainingError
from shardwise.runtime.checkpoint.locate import newest
from shardwise.runtime.checkpoint.save import RunCheckpoints
from shardwise.runtime.end import close
from shardwise.runtime.faults import guard
from shardwise.runtime.job import Job
from shardwise.runtime.metrics.log import Log
from shardwise.runtime.metrics.pace import RankPace
from shardwise.runtime.passes import StepRules
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import Launched, StepStats, sound
from shardwise.runtime.transfer import Upload

AfterStep = Callable[[TrainState, StepStats], None]


@dataclass
class PendingSteps(AbstractContextManager["PendingSteps"]):
    """Puts the figures of each step into state and log, in order. Call :meth:`log_all` before reading the state of the
    last step. When the run fails, the figures that are there are logged before it ends. ``newest_good``: this rank's
    part of the newest batch that gave finite numbers (or of the first), and its terms on all ranks."""

    job: Job
    state: TrainState
    log: Log
    checkpoints: RunCheckpoints
    after_step: Sequence[AfterStep] = ()
    pace: RankPace | None = None
    newest_good: tuple[StepBatch, int] | None = None
    _open: deque[tuple[Launched, StepBatch, bool]] = field(default_factory=deque)

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        with suppress(Exception):  # what ended the run came first
            while kind and self._open and self._open[0][0].figures.arrived():
                self._write()

    def add(self, launched: Launched, batch: StepBatch, typical: bool) -> None:
        """Take a step that was launched, on this batch; ``typical``: whether its time is a typical one. Its figures are
        logged at once if somebody waits to see them: after the first step, while steps are skipped, so that what is
        wrong is known before more are launched, and while a save waits to know whether its weights are good."""
        waited_for = bool(self.after_step) or launched.known.step == self.log.first_step + 1
        waited_for = waited_for or self.checkpoints.flight.undecided
        self._open.append((launched, batch, typical))
        if self.pace:
            self.pace.after(launched.known.step)
        while len(self._open) > (0 if waited_for or self.state.skipped_in_row else 1):
            self._log()

    def log_all(self) -> None:
        """Log all that was launched."""
        while self._open:
            self._log()

    def settle(self, upload: Upload, rules: StepRules) -> bool:
        """Return whether the weights are good, where no further step is to show it: by the batch of the last good step.
        Every rank calls this alike, once all is logged."""
        assert self.newest_good is not None, "no step was logged"
        batch, supervised = self.newest_good
        good = sound(self.state, upload(batch.micro_batches), supervised, rules)
        rules.enter("save")
        return good

    def refuse(self) -> NoReturn:
        """Raise TrainingError NUM001 at the end of a run whose last weights are not good."""
        assert self.newest_good is not None, "no step was logged"
        what = "the weights after the last step give a loss or gradients that are not finite"
        self._refuse(what, self.state.step, self.newest_good[0])

    def _refuse(self, what: str, step: int, batch: StepBatch) -> NoReturn:
        last = newest(self.checkpoints.directory)
        raise TrainingError(guard.poisoned(what, step, batch.sample_ids, last))

    def _log(self) -> None:
        """Raises TrainingError NUM001 if too many steps in a row were skipped."""
        stats, batch = self._write()
        if not stats.skipped:
            self.checkpoints.flight.confirm(good=True)
        if self.state.skipped_in_row > (allowed := self.job.recipe.run.max_skipped_steps):
            close(self.checkpoints, self.log)
            count = f"{self.state.skipped_in_row} steps in a row (run.max_skipped_steps is {allowed})"
            self._refuse(f"loss or gradients not finite for {count}", stats.step, batch)
        for call in self.after_step:
            call(self.state, stats)

    def _write(self) -> tuple[StepStats, StepBatch]:
        launched, batch, typical = self._open.popleft()
        stats = launched.wait(self.state)
        if self.newest_good is None or not stats.skipped:
            self.newest_good = batch, stats.terms
        self.log.step(self.state, stats, self.job.device, typical)
        return stats, batch
