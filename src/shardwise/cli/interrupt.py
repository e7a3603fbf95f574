"""Ctrl-C ends a command within a second, also while Python waits for a library that does not look at signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

EXIT_CODE = 130
_GRACE_S = 0.6
"""For KeyboardInterrupt to end the process in order."""
_said = threading.Lock()
_SHOW_CURSOR = b"\x1b[?25h"


def watch() -> None:
    """To be called once, in a process that is a command's own. While another handler than Python's own is set (the
    launcher's and a rank's, which save first), stopping is its business. Nothing half-written stands under a final
    name, so that the process may end anywhere."""
    heard, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(heard,), daemon=True).start()


def _watch(heard: int) -> None:
    while numbers := os.read(heard, 64):
        if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            say()
            time.sleep(_GRACE_S)
            if sys.stderr.isatty():
                os.write(2, _SHOW_CURSOR)
            os._exit(EXIT_CODE)


def say() -> None:
    """Print that the command was interrupted, once."""
    if _said.acquire(blocking=False):
        os.write(2, b"interrupted\n")
