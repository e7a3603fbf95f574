"""What becomes of a save: whether what it has copied is wanted, and how it ended. No torch here."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

Kind = Literal["committed", "maybe committed", "failed", "skipped", "removed", "unverified", "undeleted"]
NOT_FINITE = "the loss, the gradient norm or a weight was not finite on some rank"


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


class Verdict:
    """Whether the weights of the save in flight are good, which the next step that is computed from them shows. The
    thread that saves waits for it, with its copy."""

    def __init__(self) -> None:
        self._decided = threading.Event()
        self.begin(known=True)

    def begin(self, known: bool) -> None:
        """A save begins, whose weights are ``known`` to be good or not known yet."""
        self._good = known
        if known:
            self._decided.set()
        else:
            self._decided.clear()

    @property
    def open(self) -> bool:
        return not self._decided.is_set()

    def decide(self, good: bool) -> None:
        """Only the first decision counts."""
        if self.open:
            self._good = good
            self._decided.set()

    def wait(self) -> bool:
        """Wait for the decision, and return it."""
        self._decided.wait()
        return self._good
