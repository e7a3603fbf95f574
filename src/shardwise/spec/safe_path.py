"""Python processes that we start look for code where it is installed, and not in the directory they happen to stand in:
there ``python -m`` and multiprocessing look first, so that an ``xxhash.py`` beside a recipe would run in every rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""In the environment of such a process, and so of those that it starts itself, as torch's compiler does."""


@contextmanager
def safe_path() -> Iterator[None]:
    """Around the start of processes by multiprocessing. They are given this process's ``sys.path`` once they run: what
    a user's own script finds, they find. What that script starts besides gets no such environment."""
    if sys.flags.safe_path:  # handed on as it is
        yield
        return
    for name, value in SAFE_PATH.items():
        os.putenv(name, value)  # not os.environ, which other threads of the script may be copying
    try:
        yield
    finally:
        for name in SAFE_PATH:
            os.unsetenv(name)


@contextmanager
def without_main() -> Iterator[None]:
    """Around the start of processes that run our code alone: each would first run the user's script once more, and with
    it what the script does where nothing of it stands below ``if __name__ == "__main__"``."""
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
