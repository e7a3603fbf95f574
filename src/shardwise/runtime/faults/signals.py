"""Which of the signals that ask for a stop a process may receive. Imports no torch: the launcher uses it too."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable


def heeded(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Those of ``numbers`` that were not set to be ignored by whoever started this process, as nohup does with SIGHUP
    and a shell with SIGINT in the background; none outside of the main thread, where handlers cannot be set."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
