"""Counts what the processes of one start do: each writes what it does into a file that all append to."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

COUNTS = "SHARDWISE_TEST_COUNTS"
"""The file; in the environment, so that ranks find it."""
CALLS = {"resolve": "models.resolve", "choose": "planner.search"}
"""Functions that are counted, and their modules."""
FILES = ("recipe.yaml", "plan.yaml")


def count(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Count from here on, in this process: calls, and the files of ``FILES`` that are written."""

    def counted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            _note(name)
            return function(*given, **named)

        return run

    for name, place in CALLS.items():
        original = vars(import_module(f"shardwise.{place}"))[name]
        for module in [module for key, module in sys.modules.items() if key.startswith("shardwise")]:
            if vars(module).get(name) is original:
                replace(module, name, counted(original, name))
    written = Path.write_text

    def write_text(path: Path, *given: Any, **named: Any) -> int:
        if path.name in FILES:
            _note(f"writes {path.parent.name}/{path.name}")
        return written(path, *given, **named)

    replace(Path, "write_text", write_text)


def _note(what: str) -> None:
    """One line, by one system call, so that lines of several processes do not mix. None after the test: a module that
    was first imported within it goes on with what counts."""
    if COUNTS not in os.environ:
        return
    handle = os.open(os.environ[COUNTS], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(handle, f"{'rank' if 'RANK' in os.environ else 'start'}: {what}\n".encode())
    os.close(handle)


def counted(file: Path) -> dict[str, int]:
    """What was done since the last time that this was asked."""
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return dict(Counter(lines))
