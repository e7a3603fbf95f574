"""Runs a list of events once and finds the peak: bytes alive, by category, and what they were at the highest moment."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

Event = tuple[Hashable, str, int]
"""(key, category, bytes): bytes > 0 come into being under ``key``, 0 frees what stands there. A negative number marks a
moment whose name is ``key``."""
MARK = -1


@dataclass
class Replay:
    """``peak`` is by category at the highest moment; ``moments`` holds the same for each mark, the first time."""

    peak_bytes: int = 0
    peak: dict[str, int] = field(default_factory=dict)
    moments: dict[Hashable, dict[str, int]] = field(default_factory=dict)


def replay(events: Iterable[Event]) -> Replay:
    """Raises KeyError where an event frees what is not alive, ValueError where one makes what is."""
    alive: dict[Hashable, tuple[str, int]] = {}
    totals: dict[str, int] = {}
    total = 0
    result = Replay()
    for key, category, size in events:
        if size > 0:
            if key in alive:
                raise ValueError(f"{key} is alive already")
            alive[key] = (category, size)
            totals[category] = totals.get(category, 0) + size
            total += size
            if total > result.peak_bytes:
                result.peak_bytes = total
                result.peak = dict(totals)
        elif size == 0:
            category, size = alive.pop(key)
            totals[category] -= size
            total -= size
        else:
            result.moments.setdefault(key, dict(totals))
    return result
