"""A list of events in the making, which raises where one cannot be true."""

from __future__ import annotations

from collections.abc import Hashable

from shardwise.planner.replay import MARK, Event


class Tape:
    """The events so far, and the bytes of what is alive; what has none makes no event."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.alive: dict[Hashable, int] = {}

    def make(self, key: Hashable, category: str, size: int) -> None:
        """Raises KeyError where ``key`` is alive already."""
        if key in self.alive:
            raise KeyError(f"{key} is made, but it is alive already")
        self.alive[key] = size
        if size:
            self.events.append((key, category, size))

    def hold(self, key: Hashable, category: str, size: int) -> None:
        """Make ``key``, unless it is there already: what is added to."""
        if key not in self.alive:
            self.make(key, category, size)

    def free(self, key: Hashable) -> None:
        """Raises KeyError where ``key`` is not alive: whoever frees it has counted wrong."""
        if key not in self.alive:
            raise KeyError(f"{key} is freed, but it is not alive")
        if self.alive.pop(key):
            self.events.append((key, "", 0))

    def mark(self, name: str) -> None:
        self.events.append((name, "", MARK))
