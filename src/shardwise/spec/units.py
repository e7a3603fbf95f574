"""Numbers for people: reads sizes such as ``8k``, and formats bytes, counts and tables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKmM])")
_BINARY = {"k": 2**10, "m": 2**20}
_SCALES = {"tokens": _BINARY, "bytes": _BINARY, "steps": {"k": 1_000, "m": 1_000_000}}


def read_size(text: str, unit: str) -> int | None:
    """``8k`` is 8,192 tokens but 8,000 steps, as the field says it. None when ``text`` is no size or not whole."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    size = float(match.group(1)) * _SCALES[unit][match.group(2).lower()]
    return int(size) if size.is_integer() else None


def typed(path: Path | str) -> str:
    """A path quoted for a shell."""
    return shlex.quote(str(path))


def counted(number: int, noun: str) -> str:
    """``1 step``, ``2,000 steps``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def show_bytes(count: float) -> str:
    """``14.2 GiB``; three significant digits at most."""
    return _scaled(count, {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}, " B")


def show_payload(count: float) -> str:
    """Traffic, in powers of ten as network vendors count: ``22.4 MB``."""
    return _scaled(count, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}, " B")


def show_count(count: float) -> str:
    """``70.6 B`` parameters, ``3.3 M`` tokens."""
    return _scaled(count, {"T": 1e12, "B": 1e9, "M": 1e6}, "")


def show_seconds(seconds: float) -> str:
    """``10.5 s``, ``1.25 s``, ``3.2 ms``, ``40 us``: of a few seconds two decimals, since plans are told apart by
    them."""
    if 1 <= seconds < 9.995:
        return f"{seconds:.2f} s"
    return _scaled(seconds * 1e6, {"s": 1e6, "ms": 1e3}, " us")


def clock(seconds: float) -> str:
    """``1:41`` or ``2:03:09``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_age(seconds: float) -> str:
    """``3 days ago``, ``1 hour ago``, ``just now``."""
    for unit, length_s in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if (number := int(seconds // length_s)) >= 1:
            return f"{counted(number, unit)} ago"
    return "just now"


def _scaled(count: float, units: Mapping[str, float], smallest: str) -> str:
    for unit, scale in units.items():
        if abs(count) >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count:,.0f}{smallest}"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown; ``-`` for None."""
    shown = [["-" if cell is None else str(cell).replace("|", "/") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ("---",) * len(heads), *shown))


def columns(rows: Sequence[tuple[str, ...]], align: str) -> list[str]:
    """Rows as lines with aligned columns; ``align`` has one of ``<`` and ``>`` for each column."""
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(len(align))]
    lines = []
    for row in rows:
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return lines
