"""``shardwise``, ``python -m shardwise``, also as ``torchrun -m shardwise``: Ctrl-C ends a command in order also while
its code is still being loaded. So this module, and the package's own, import next to nothing."""

import os
import signal
import sys
from importlib import import_module
from types import FrameType

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the working directory, where ``-m`` looks first, under a user's own torchrun too

from shardwise.launch.ranks import is_worker

TRACKER = "ignore:resource_tracker"
"""Of the process by which multiprocessing removes what another one leaves that was ended by a signal: it does that, and
need not warn of it."""


def main() -> int:
    """Load the commands and run the one that was named; its exit code."""
    sys.warnoptions.append(TRACKER)
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # a shell has it ignored for what runs in the background
        signal.signal(signal.SIGINT, _leave)
    app = import_module("shardwise.cli.app")
    signal.signal(signal.SIGINT, usual)
    code: int = app.main()
    return code


def _leave(number: int, frame: FrameType | None) -> None:
    if not is_worker():  # the launcher says it for its ranks
        os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
