"""The fate of a save: whether what it has copied is wanted, and how it ended. No torch here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["committed", "maybe committed", "failed", "skipped", "removed", "unverified", "undeleted"]
NOT_FINITE = "the loss, the gradient norm or a weight was not finite on some rank"
UNCONFIRMED = "the run ended before the next step had shown its weights to be good"


@dataclass(frozen=True)
class SaveResult:
    """The outcome of a save, the same on every rank. ``seconds`` is from the call of save to the commit.

    committed: durable. maybe committed: visible, but the disk did not confirm it. failed: not saved; the previous one
    is. skipped: a rank voted against it, or the weights turned out not to be good. removed: deleted by retention.
    unverified: committed, but it could not be read back as it was written, so older ones stay. undeleted: committed,
    but older ones could not be deleted.
    """

    kind: Kind
    step: int
    what: str
    seconds: float = 0.0


class InFlight:
    """The save in flight, at most one: its thread, which waits with its copy until the weights are known to be good,
    and the outcomes of saves. What no step has confirmed is not saved."""

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self.thread: threading.Thread | None = None
        self.results: list[SaveResult] = []
        self._over: list[SaveResult] = []
        self._decided = threading.Event()
        self._decided.set()
        self._good = True
        self.why_not = NOT_FINITE
        """Of a save that is not wanted."""

    def begin(self, work: Callable[[], None], known: bool) -> None:
        """Begin a save, which ``work`` does, of weights that are ``known`` to be good or not known yet. The one before
        must have ended."""
        self._good, self.why_not = known, NOT_FINITE
        if known and not self.asynchronous:
            work()
            return
        if not known:
            self._decided.clear()
        self.thread = threading.Thread(target=work, daemon=True, name="checkpoint")
        self.thread.start()

    @property
    def undecided(self) -> bool:
        """Return whether a save waits for ``confirm``."""
        return not self._decided.is_set()

    def confirm(self, good: bool) -> None:
        """Say whether the weights of a save that waits are ``good``, which the next step that is computed from them
        shows; every rank calls this alike. Nothing happens where none waits. Where saving is not asynchronous, it is
        done when this returns."""
        if self.undecided:
            self._good = good
            self._decided.set()
            if not self.asynchronous:
                self.end()

    def wanted(self) -> bool:
        """Wait, in the thread, until it is known whether the weights are good."""
        self._decided.wait()
        return self._good

    def end(self, at_most_s: float | None = None) -> None:
        """Wait for the save, and keep its outcome for ``take``."""
        if self.undecided:
            self.why_not = UNCONFIRMED
            self.confirm(good=False)
        if self.thread is not None:
            self.thread.join(at_most_s)
        self._collect()

    def take(self) -> list[SaveResult]:
        """The outcomes, since the last call, of saves that are over; never blocks."""
        self._collect()
        found, self._over = self._over, []
        return found

    def _collect(self) -> None:
        if self.thread is None or not self.thread.is_alive():
            self.thread = None
            self._over += self.results
            self.results.clear()
