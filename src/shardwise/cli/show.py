"""The printing of errors, notices and tables; plain lines where there is no terminal."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.errors import (
    NO_ROOM,
    UNWRITABLE,
    MissingInputError,
    OutputError,
    Problem,
    ShardwiseError,
    TrainingError,
    first_line,
    no_memory,
)


def print_error(error: ShardwiseError, *, as_json: bool, prefix: str = "") -> None:
    """Print an error to stderr for people, to stdout as one object for programs."""
    if as_json:
        print(json.dumps({"error": error.as_dict()}))
        return
    texts = [prefix + visible(str(problem)) for problem in error.problems]
    if sys.stderr.isatty():
        parts = (text.partition(":") for text in texts)
        texts = [f"\x1b[1;31m{head}\x1b[0m:{rest}" for head, _, rest in parts]
    print(*texts, sep="\n\n", file=sys.stderr)


def defect(error: Exception, kept: Path, fix: str) -> ShardwiseError:
    """BUG001, for an error that is not the user's; the traceback is in ``kept``."""
    name, said = type(error).__name__, first_line(error)
    what = f"a bug in shardwise: {name}" + (f": {said}" if said != name else "")
    return ShardwiseError(Problem("BUG001", what, f"the full traceback is in {kept}", fix))


def out_of_memory(error: Exception) -> ShardwiseError | None:
    """MEM001, for an allocation that failed where nothing better is known of it; None for another error."""
    said = no_memory(error)
    fix = "stop other programs on this machine, raise the limit of the container, the job or the shell (`ulimit -v`)"
    problem = Problem("MEM001", f"out of memory: {said}", "this process", f"{fix}, or use a machine with more")
    return None if said is None else TrainingError(problem)


def explained(error: Exception) -> ShardwiseError:
    """An error that nothing else explains, as one to be shown: of a path, a disk or memory, else a defect of ours."""
    if isinstance(error, ShardwiseError):
        return error
    return _impossible(error) or _full(error) or out_of_memory(error) or _defect(error)


def _full(error: Exception) -> ShardwiseError | None:
    """The problem of a disk that is full or was made read-only, wherever it was raised: the output's, or a cache's."""
    if not isinstance(error, OSError) or error.errno not in UNWRITABLE:
        return None
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails once more when it closes it
    where = str(error.filename or "the output, a cache or a temporary file")
    fixes = {errno.EFBIG: "raise `ulimit -f`", errno.EROFS: "a directory on a disk that can be written"}
    fix = fixes.get(error.errno, "make room there")
    return OutputError(Problem("OUT003", f"{error.strerror}: not everything was written", where, fix))


def _impossible(error: Exception) -> ShardwiseError | None:
    """The problem of a path that no file system accepts, wherever it was raised."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
        return None
    name = str(error.filename)
    shown = name if len(name) <= 80 else f"{name[:80]}... ({len(name):,} characters)"
    what = f"no file can be opened as {shown}: {error.strerror}"
    return MissingInputError(Problem("CFG011", what, "a path in the recipe or on the command line", "another path"))


def _defect(error: Exception) -> ShardwiseError:
    """Write the traceback to a file: on the screen it would hide the message."""
    descriptor, name = tempfile.mkstemp(prefix="shardwise-", suffix=".traceback")
    with os.fdopen(descriptor, "w") as stream:
        stream.write("".join(traceback.format_exception(error)))
    return defect(error, Path(name), "report it with that file; --debug prints the traceback")


def visible(text: str) -> str:
    """Control characters that came from a file or an argument are shown, never sent to the terminal (B-79)."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def note(text: str, *, as_json: bool = False) -> None:
    """A notice, which is not part of the result: to stderr, and left out under ``--json``."""
    if not as_json:
        print(visible(text), file=sys.stderr)


def say(*lines: str) -> None:
    """Print lines of the result; an empty one if none is given."""
    print(*lines, sep="\n", flush=True)


@contextmanager
def working(words: str) -> Iterator[None]:
    """Show, where stderr is a terminal, a line that tells what is being done while it is."""
    shown = sys.stderr.isatty()
    if shown:
        print(f"{words} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def say_as_known(words: str, parts: Iterator[list[str]]) -> None:
    """Print each part of the result as soon as it is known, with ``words`` for what is done until then."""
    while True:
        with working(words):
            lines = next(parts, None)
        if lines is None:
            return
        say(*lines)


def print_json(value: Any) -> None:
    """Print ``value`` as one JSON document."""
    print(json.dumps(value, indent=1, default=str))


@contextmanager
def output_to_stderr() -> Iterator[None]:
    """Send what ranks print (they inherit stdout) to stderr, so that stdout holds one JSON object only."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def coloured(text: str, colour: str) -> str:
    """``text`` in red, yellow or green on a terminal."""
    if not sys.stdout.isatty():
        return text
    return f"\x1b[{ {'red': 31, 'yellow': 33, 'green': 32}[colour] }m{text}\x1b[0m"


_LOST = (errno.EIO, errno.EPIPE, *NO_ROOM)
"""A closed terminal, a reader that has ended (``| head``), or a full disk."""


class _LossyStream(io.FileIO):
    """An output that may be lost: further text is then dropped without an error."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in _LOST:
                raise
            return memoryview(data).nbytes


def outlive_output() -> None:
    """Let this process go on when its output is lost: a run goes on without a terminal (`disown`), or saves."""
    for name in ("stdout", "stderr"):
        stream = vars(sys)[name]
        if stream is not None and stream is vars(sys)[f"__{name}__"]:
            raw = io.BufferedWriter(_LossyStream(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True))
