"""A list of events in the making."""

from __future__ import annotations

from collections.abc import Hashable

from shardwise.planner.replay import MARK, Event


class Tape:
    """The events so far, and what is alive, so that a whole unit can be cleared away."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.alive: dict[Hashable, None] = {}

    def make(self, key: Hashable, category: str, size: int) -> None:
        if size > 0:
            self.events.append((key, category, size))
            self.alive[key] = None

    def hold(self, key: Hashable, category: str, size: int) -> None:
        """Make ``key``, unless it is there already: what is added to."""
        if key not in self.alive:
            self.make(key, category, size)

    def free(self, key: Hashable) -> None:
        """Raises KeyError where ``key`` is not alive: whoever frees it has counted wrong."""
        if key not in self.alive:
            raise KeyError(f"{key} is freed, but it is not alive")
        del self.alive[key]
        self.events.append((key, "", 0))

    def release(self, key: Hashable) -> None:
        """Free ``key`` if it is still there: for callers that do not know whether it is."""
        if key in self.alive:
            self.free(key)

    def mark(self, name: str) -> None:
        self.events.append((name, "", MARK))
