"""A span: what a stretch of events comes to, as a few numbers.

Of bytes alive on a tier, which rise and fall, it keeps what is left of them at its end and how high they stood above
its beginning; of operations, messages and copies, their sums. Two spans one after the other make a span, and so does
one that is repeated, with no look at the events in it: a run of blocks that are alike costs as much as one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwise.spec.sheet import Tier
from shardwise.techniques.events import Compute, Copy, Event, Free, Make, Mark, Send


@dataclass(slots=True)
class Level:
    """Bytes alive on one tier. ``change`` is by category from beginning to end, and ``net_bytes`` their sum;
    ``top_bytes`` is the highest that all of them stood above the beginning, and ``top`` the same by category at the
    first such moment."""

    net_bytes: int = 0
    top_bytes: int = 0
    change: dict[str, int] = field(default_factory=dict)
    top: dict[str, int] = field(default_factory=dict)

    def moves(self, category: str, size: int) -> None:
        """Add so many bytes of a category; fewer, where ``size`` is negative."""
        self.change[category] = self.change.get(category, 0) + size
        self.net_bytes += size
        if self.net_bytes > self.top_bytes:
            self.top_bytes, self.top = self.net_bytes, self.change.copy()

    def follows(self, other: Level) -> None:
        """Add all of another level, which follows this one."""
        if self.net_bytes + other.top_bytes > self.top_bytes:
            self.top_bytes = self.net_bytes + other.top_bytes
            self.top = _sum(self.change, other.top)
        self.net_bytes += other.net_bytes
        change = self.change
        for category, size in other.change.items():
            change[category] = change.get(category, 0) + size

    def repeated(self, n: int) -> Level:
        """This level ``n`` times in a row, once or more."""
        before = n - 1 if self.net_bytes > 0 else 0  # repetitions before the one that stands highest
        return Level(
            net_bytes=n * self.net_bytes,
            top_bytes=before * self.net_bytes + self.top_bytes,
            change={category: n * size for category, size in self.change.items()},
            top=_sum({category: before * size for category, size in self.change.items()}, self.top),
        )


@dataclass(slots=True)
class Span(Level):
    """The bytes are the device's; ``others`` has those of other tiers. ``sent`` counts the calls of each collective,
    and ``copied`` the copies. ``busy_ns`` is for how long the device computes, by kind, and ``host_ns`` how long the
    host launches that."""

    flops: int = 0
    sent: dict[Send, int] = field(default_factory=dict)
    others: dict[Tier, Level] = field(default_factory=dict)
    copied: dict[Copy, int] = field(default_factory=dict)
    host_ns: int = 0
    busy_ns: dict[str, int] = field(default_factory=dict)

    def on(self, tier: Tier) -> Level:
        """Bytes alive on a tier."""
        return self if tier == "device" else self.others.setdefault(tier, Level())

    def adds(self, event: Event) -> None:
        """One event more."""
        if isinstance(event, Make):
            self.on(event.tier).moves(event.category, event.bytes)
        elif isinstance(event, Free):
            self.on(event.tier).moves(event.category, -event.bytes)
        elif isinstance(event, Compute):
            self.flops += event.flops
            if event.device_ns:
                self.host_ns += event.host_ns
                self.busy_ns[event.kind] = self.busy_ns.get(event.kind, 0) + event.device_ns
        elif isinstance(event, Send):
            self.sent[event] = self.sent.get(event, 0) + 1
        elif isinstance(event, Copy):
            self.copied[event] = self.copied.get(event, 0) + 1

    def goes_on(self, other: Span) -> None:
        """Add all of another span, which follows this one."""
        self.follows(other)
        self.flops += other.flops
        if other.busy_ns:
            self.host_ns += other.host_ns
            for kind, size in other.busy_ns.items():
                self.busy_ns[kind] = self.busy_ns.get(kind, 0) + size
        sent = self.sent
        for send, count in other.sent.items():
            sent[send] = sent.get(send, 0) + count
        if other.others or other.copied:
            for tier, level in other.others.items():
                self.on(tier).follows(level)
            for copy, count in other.copied.items():
                self.copied[copy] = self.copied.get(copy, 0) + count

    def times(self, n: int) -> Span:
        """This span ``n`` times in a row."""
        if n == 0:
            return Span()
        device = self.repeated(n)
        return Span(
            device.net_bytes,
            device.top_bytes,
            device.change,
            device.top,
            n * self.flops,
            {send: n * count for send, count in self.sent.items()},
            {tier: level.repeated(n) for tier, level in self.others.items()},
            {copy: n * count for copy, count in self.copied.items()},
            n * self.host_ns,
            {kind: n * size for kind, size in self.busy_ns.items()},
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
    """Say whether two spans come to the same; a category of which there is nothing need not be named."""
    return _figures(one) == _figures(other)


def _figures(span: Span) -> tuple[object, ...]:
    tiers = {"device": span, **span.others}
    memory = {tier: (at.net_bytes, at.top_bytes, Counter(at.change), Counter(at.top)) for tier, at in tiers.items()}
    held = {tier: figures for tier, figures in memory.items() if any(figures)}
    return held, span.flops, span.sent, span.copied, span.host_ns, span.busy_ns


def fold(events: Iterable[Event]) -> Span:
    """The span of events, one by one."""
    span = Span()
    for event in events:
        span.adds(event)
    return span


def memory_at_marks(events: Iterable[Event]) -> dict[str, dict[str, int]]:
    """Bytes alive on the device by category at each mark, the first time."""
    found: dict[str, dict[str, int]] = {}
    span = Span()
    for event in events:
        if isinstance(event, Mark):
            found.setdefault(event.name, span.change.copy())
        span.adds(event)
    return found
