"""Units traced in a process of its own, where no process group lives. It imports torch once, and waits for more.

That process is planner/tracer.py.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from shardwise.spec.safe_path import safe_path


def traced_apart(names: list[str], kept_in: Path) -> list[Any]:
    """The packed units of the variants of these names. Says once on stderr why it takes a while, and where they are
    ``kept_in``. Raises RuntimeError with what the other process said where it ended."""
    process, said = _process(kept_in)
    if process.poll() is not None:  # it has waited long enough
        _ended(process, said)
        process, said = _process(kept_in)
    assert process.stdin and process.stdout
    found = []
    for name in names:
        with suppress(BrokenPipeError):  # it has ended; why, is in what it said
            print(name, file=process.stdin, flush=True)
        # What a library prints there is no unit.
        unit = next((line for line in process.stdout if line.startswith("[")), None)
        if unit is None:
            raise RuntimeError(f"a unit could not be traced:\n{_ended(process, said)}")
        found.append(json.loads(unit))
    return found


def _ended(process: subprocess.Popen[str], said: IO[str]) -> str:
    """End the process, which gets nothing more to read, and return what it ``said``; empty where that was read."""
    _process.cache_clear()
    if said.closed:
        return ""
    if process.stdin:
        with suppress(BrokenPipeError):
            process.stdin.close()
    process.wait()
    with said:
        said.seek(0)
        words = said.read()
    with suppress(BrokenPipeError), process:
        pass  # a name that it has not read is lost
    return words


@cache
def _process(kept_in: Path) -> tuple[subprocess.Popen[str], IO[str]]:
    """Start the tracing process, and return it with the file of what it says on stderr. It ends when this process does,
    if not before."""
    begun = "\r\x1b[K" * sys.stderr.isatty()  # over a line that tells what is being done
    told = f"tracing the units of a model that is new here: once, some seconds; kept in {kept_in}"
    print(begun + told, file=sys.stderr)
    said = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
    command = [sys.executable, "-P", "-m", "shardwise.planner.tracer"]
    with safe_path():
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said, text=True, encoding="utf-8")
    atexit.register(_ended, process, said)
    return process, said
