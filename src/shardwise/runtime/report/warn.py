"""A failure in something that only reports (a sample, report.md, a trace, a measurement) becomes a warning and does not
end the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


def warn(text: str) -> None:
    """Print ``text`` on the terminal, at once."""
    print(text, flush=True)


@contextmanager
def only_reports(what: str, say: Callable[[str], None] = warn) -> Iterator[None]:
    """Turn an error in the block into a warning about ``what``; the run goes on. No rank may wait for another in the
    block."""
    try:
        yield
    except Exception as error:
        say(failure(what, error))


def failure(what: str, error: Exception) -> str:
    """A line that says so."""
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return f"warning[REP001]: {what} failed: {reason}; the run is not affected"
