"""Bounds on memory and processor time for what came with a tokenizer: chat templates, which are programs, and tables
that lengthen a text."""

from __future__ import annotations

import base64
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from types import FrameType
from typing import Any

from shardwise.errors import PolicyError, Problem

LIMIT_S = 2.0
LIMIT_BYTES = 2**30
"""What a template may take beside what the process has already."""
WHERE = "data.chat_template"
_TICKS = 4
_GROWTH = 1024
"""A tokenizer that may make a text longer than this many times is refused. Real ones reach some hundred (NFKC's longest
expansion is 18 characters of 2 bytes)."""
_INSERTED = ("content", "prepend", "replacement", "prefix", "suffix", "continuing_subword_prefix", "end_of_word_suffix")
"""Keys of tokenizer.json under which text to insert stands."""
_AS_IT_IS = ("pattern", "vocab", "merges")


class _Bounds:
    """The state of the bounds of this process: whether they are ``held``, and the ticks since what is timed began;
    None: nothing is timed."""

    held = False
    ticks: int | None = None


class _OutOfTime(BaseException):
    """The error of a template that runs for too long. It is no Exception: jinja passes over those while it computes the
    constant parts of a template."""


def refused(why: str) -> PolicyError:
    """SEC009: a template does what no template needs."""
    fix = "use a template that you trust: data.chat_template=<a name, a file or the text>"
    return PolicyError(Problem("SEC009", f"the chat template was refused: {why}", WHERE, fix))


@contextmanager
def bounded() -> Iterator[None]:
    """Let the address space grow by LIMIT_BYTES and a clock tick; raises SEC009 where memory runs out. Around a whole
    record: the calls into the system would cost as much as a rendering. Only in the main thread, since signals need it;
    inside itself it does nothing. The signal's handler stays if there was none before, or only one set by C."""
    if _Bounds.held or threading.current_thread() is not threading.main_thread():
        yield
        return
    limits, before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)
    if before is not _tick:
        signal.signal(signal.SIGVTALRM, _tick)
    resource.setrlimit(resource.RLIMIT_AS, (_room(*limits), limits[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S / _TICKS, LIMIT_S / _TICKS)
    _Bounds.held = True
    try:
        try:
            yield
        finally:
            _Bounds.held = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            resource.setrlimit(resource.RLIMIT_AS, limits)
            if before not in (None, _tick, signal.SIG_DFL):  # None: a handler set by C
                signal.signal(signal.SIGVTALRM, before)
    except MemoryError as error:
        raise refused(f"it took more than {LIMIT_BYTES // 2**20:,} MiB of memory") from error


@contextmanager
def timed() -> Iterator[None]:
    """Bound the block as :func:`bounded` does, and raise TimeoutError after LIMIT_S of processor time."""
    with bounded():
        _Bounds.ticks = 0
        try:
            yield
        except _OutOfTime as error:
            raise TimeoutError(f"it ran for more than {LIMIT_S:g} s") from error
        finally:
            _Bounds.ticks = None


def _tick(number: int, frame: FrameType | None) -> None:
    if _Bounds.ticks is not None:
        _Bounds.ticks += 1
        if _Bounds.ticks > _TICKS:  # the first tick may come at once
            _Bounds.ticks = 0  # one that came while this error passes would leave the limits of memory and the clock on
            raise _OutOfTime


def _room(soft: int, hard: int) -> int:
    """Return how large the address space may become, in bytes."""
    if not sys.platform.startswith("linux"):
        return soft
    taken = int(os.pread(_statm(os.getpid()), 64, 0).split()[0]) * resource.getpagesize()
    return min(taken + LIMIT_BYTES, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY), 2**62)


@cache
def _statm(pid: int) -> int:
    """The sizes of this process, opened once: opening it takes ten times as long as reading it."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def check_growth(tokenizer: dict[str, Any]) -> None:
    """Raises ValueError where the content of a tokenizer.json may make a text very much longer."""
    for name in ("normalizer", "pre_tokenizer", "model", "decoder"):
        if (times := growth(tokenizer.get(name))) > _GROWTH:
            raise ValueError(f"its {name} may make a text {times:.3g} times as long, at most {_GROWTH:,} are allowed")


def growth(part: Any) -> float:
    """Return by how many times a part of a tokenizer.json may lengthen a text, at most."""
    if isinstance(part, list):
        return prod(map(growth, part))
    if not isinstance(part, dict):
        return 1.0
    if isinstance(table := part.get("precompiled_charsmap"), str):  # sentencepiece: a size, a trie, texts between NULs
        blob = base64.b64decode(table)
        return float(max(map(len, blob[4 + int.from_bytes(blob[:4], "little") :].split(b"\0"))))
    inserted = max((len(text) for key in _INSERTED if isinstance(text := part.get(key), str)), default=0)
    pattern = part.get("pattern")
    found = pattern.get("String") if isinstance(pattern, dict) else None
    times = inserted / len(found) if found else inserted + (pattern is not None and inserted > 0)
    return max(1.0, times) * prod(growth(value) for key, value in part.items() if key not in _AS_IT_IS)
