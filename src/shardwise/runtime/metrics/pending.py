"""Steps that are launched and whose figures are not yet read: each is logged a step late, while the device computes the
next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field

from shardwise.errors import TrainingError
from shardwise.runtime.checkpoint.save import RunCheckpoints
from shardwise.runtime.end import close
from shardwise.runtime.faults import guard
from shardwise.runtime.job import Job
from shardwise.runtime.metrics.log import Log
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import Launched, StepStats

AfterStep = Callable[[TrainState, StepStats], None]


@dataclass
class PendingSteps(AbstractContextManager["PendingSteps"]):
    """Puts the figures of each step into state and log, in order. Call :meth:`log_all` before reading the state of the
    last step. When the run fails, the figures that are there are logged before it ends."""

    job: Job
    state: TrainState
    log: Log
    checkpoints: RunCheckpoints
    after_step: Sequence[AfterStep] = ()
    _open: deque[tuple[Launched, Sequence[int], bool]] = field(default_factory=deque)

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        with suppress(Exception):  # what ended the run came first
            while kind and self._open and self._open[0][0].figures.arrived():
                self._write()

    def add(self, launched: Launched, sample_ids: Sequence[int], typical: bool) -> None:
        """A step was launched, on these samples of this rank; whether its time is a ``typical`` one. Its figures are
        logged at once if somebody waits to see them: after the first step, and while steps are skipped, so that what is
        wrong is known before more are launched."""
        waited_for = bool(self.after_step) or launched.known.step == self.log.first_step + 1
        self._open.append((launched, sample_ids, typical))
        while len(self._open) > (0 if waited_for or self.state.skipped_in_row else 1):
            self._log()

    def log_all(self) -> None:
        """Log all that was launched."""
        while self._open:
            self._log()

    def _log(self) -> None:
        """Raises TrainingError NUM001 if too many steps in a row were skipped."""
        stats, sample_ids = self._write()
        if self.state.skipped_in_row > (allowed := self.job.recipe.run.max_skipped_steps):
            close(self.checkpoints, self.log)
            raise TrainingError(guard.poisoned(self.state.skipped_in_row, allowed, stats.step, sample_ids))
        for call in self.after_step:
            call(self.state, stats)

    def _write(self) -> tuple[StepStats, Sequence[int]]:
        launched, sample_ids, typical = self._open.popleft()
        stats = launched.wait(self.state)
        self.log.step(self.state, stats, self.job.device, typical)
        return stats, sample_ids
