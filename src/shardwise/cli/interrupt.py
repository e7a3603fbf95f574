"""Ctrl-C ends a command within a second, also while Python waits for a library that does not look at signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

EXIT_CODE = 130
_GRACE_S = 0.6
"""How long KeyboardInterrupt may take to end the process cleanly."""
_said = threading.Lock()
_SHOW_CURSOR = b"\x1b[?25h"


def watch() -> None:
    """Call once, in a process that runs only this command. While a handler other than Python's own is set (the
    launcher's or a rank's, which save first), that handler decides how to stop. Files are written whole under their
    final names or not at all, so the process may end anywhere."""
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
