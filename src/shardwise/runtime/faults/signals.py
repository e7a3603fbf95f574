"""The signals that ask for a stop and that a process may receive. Imports no torch: the launcher uses it too."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask for a stop: SIGHUP comes of a terminal that is closed, SIGUSR1 from Slurm, as a warning."""


def heeded(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return those of ``numbers`` that were not set to be ignored by whoever started this process, as nohup does with
    SIGHUP and a shell with SIGINT in the background; none outside of the main thread, where handlers cannot be set."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def received(
    by: Callable[[int, FrameType | None], None], leaving: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Within it, ``by`` is called when a stop is asked for; the old handlers come back at the end, but in a process
    that is ``leaving``: there a second request would end it with another exit code, and is ignored. Signals that are
    ignored stay so: the SIGHUP of a closing terminal under nohup."""
    before = {number: signal.signal(number, by) for number in heeded(ASKING)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_IGN if leaving() else old)
