"""What a stretch of events comes to, as a number of each kind: a span.

Of bytes alive, which rise and fall, it keeps what is left of them at its end and how high they stood above its
beginning; of operations and messages, their sums. Two spans one after the other make a span, and so does one that is
repeated, with no look at the events in it: a run of blocks that are alike costs as much as one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwise.planner.events import Compute, Event, Free, Make, Mark, Send


@dataclass(slots=True)
class Span:
    """``change`` is in bytes by category from beginning to end, and ``net_bytes`` their sum; ``top_bytes`` is the
    highest that all of them stood above the beginning, and ``top`` the same by category at the first such moment.
    ``sent`` counts the calls of each collective."""

    net_bytes: int = 0
    top_bytes: int = 0
    change: dict[str, int] = field(default_factory=dict)
    top: dict[str, int] = field(default_factory=dict)
    flops: int = 0
    sent: dict[Send, int] = field(default_factory=dict)

    def adds(self, event: Event) -> None:
        """One event more."""
        if isinstance(event, Make):
            self.moves(event.category, event.bytes)
        elif isinstance(event, Free):
            self.moves(event.category, -event.bytes)
        elif isinstance(event, Compute):
            self.flops += event.flops
        elif isinstance(event, Send):
            self.sent[event] = self.sent.get(event, 0) + 1

    def moves(self, category: str, size: int) -> None:
        """So many bytes more of a category; fewer, where it is negative."""
        self.change[category] = self.change.get(category, 0) + size
        self.net_bytes += size
        if self.net_bytes > self.top_bytes:
            self.top_bytes, self.top = self.net_bytes, self.change.copy()

    def goes_on(self, other: Span) -> None:
        """All of another span more."""
        if self.net_bytes + other.top_bytes > self.top_bytes:
            self.top_bytes = self.net_bytes + other.top_bytes
            self.top = _sum(self.change, other.top)
        self.net_bytes += other.net_bytes
        change, sent = self.change, self.sent
        for category, size in other.change.items():
            change[category] = change.get(category, 0) + size
        self.flops += other.flops
        for send, count in other.sent.items():
            sent[send] = sent.get(send, 0) + count

    def times(self, n: int) -> Span:
        """This span ``n`` times in a row."""
        if n == 0:
            return Span()
        before = n - 1 if self.net_bytes > 0 else 0  # repetitions before the one that stands highest
        return Span(
            net_bytes=n * self.net_bytes,
            top_bytes=before * self.net_bytes + self.top_bytes,
            change={category: n * size for category, size in self.change.items()},
            top=_sum({category: before * size for category, size in self.change.items()}, self.top),
            flops=n * self.flops,
            sent={send: n * count for send, count in self.sent.items()},
        )


def _sum(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    total = dict(one)
    for category, size in other.items():
        total[category] = total.get(category, 0) + size
    return total


def joined(spans: Iterable[Span]) -> Span:
    """Spans one after another."""
    total = Span()
    for span in spans:
        total.goes_on(span)
    return total


def same(one: Span, other: Span) -> bool:
    """Whether two spans come to the same; a category of which there is nothing need not be named."""
    return _figures(one) == _figures(other)


def _figures(span: Span) -> tuple[object, ...]:
    return span.net_bytes, span.top_bytes, Counter(span.change), Counter(span.top), span.flops, span.sent


def fold(events: Iterable[Event]) -> Span:
    """The span of events, one by one."""
    span = Span()
    for event in events:
        span.adds(event)
    return span


def moments(events: Iterable[Event]) -> dict[object, dict[str, int]]:
    """Bytes alive by category at each mark, the first time."""
    found: dict[object, dict[str, int]] = {}
    alive: Counter[str] = Counter()
    for event in events:
        if isinstance(event, Mark):
            found.setdefault(event.name, dict(alive))
        elif isinstance(event, Make):
            alive[event.category] += event.bytes
        elif isinstance(event, Free):
            alive[event.category] -= event.bytes
    return found
