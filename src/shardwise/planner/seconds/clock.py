"""A log that keeps time instead of events: when each thing of a step happens.

The host launches kernels in their order; the device computes one as soon as it is launched and the one before it is
done. Collectives of a stream run one after another beside that, each when it is given and what it waits for is there;
on GPUs those of different streams that take the same links follow one another too, in the order in which they are
given. What the device waits for that is not its own work is exposed communication, and counted to the axis it was sent
along.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

from shardwise.planner.event_log import Folding
from shardwise.planner.seconds.constants import shipped
from shardwise.planner.seconds.network import Network
from shardwise.planner.seconds.rates import Rates
from shardwise.planner.spans import Span
from shardwise.spec.sheet import Tier
from shardwise.techniques.events import Begin, Copy, Event, Key, Mark, Send

Times = defaultdict[str, float]
"""Seconds by name."""


@dataclass
class Elapsed:
    """Seconds from the beginning: of the host's launches, of each stream, and until when links are taken by streams
    beside the device's; and what they come to: ``busy_s`` of the device by kind of kernel, ``exposed_s`` and ``sent_s``
    by axis."""

    host_s: float = 0.0
    at_s: Times = field(default_factory=lambda: defaultdict(float))
    links_s: Times = field(default_factory=lambda: defaultdict(float))
    busy_s: Times = field(default_factory=lambda: defaultdict(float))
    exposed_s: Times = field(default_factory=lambda: defaultdict(float))
    sent_s: Times = field(default_factory=lambda: defaultdict(float))

    def copy(self) -> Elapsed:
        return Elapsed(self.host_s, *(times.copy() for times in self.counters()))

    def goes_on(self, earlier: Elapsed, later: Elapsed, times: int) -> None:
        """Add ``times`` times what passed between two moments."""
        self.host_s += times * (later.host_s - earlier.host_s)
        for mine, early, late in zip(self.counters(), earlier.counters(), later.counters(), strict=True):
            for key in [*late]:
                mine[key] += times * (late[key] - early[key])

    def counters(self) -> tuple[Times, ...]:
        return self.at_s, self.links_s, self.busy_s, self.exposed_s, self.sent_s


def waited_s(send: Send, network: Network, hidden: float) -> float:
    """Return the seconds that the device waits for a message that is sent between kernels, of which a share is
    ``hidden`` behind others, or what is computed meanwhile is known."""
    return max(0.0, (1 - hidden) * network.seconds(send.kind, send.axis, send.bytes) - send.beside_ns / 1e9)


class StepClock(Folding):
    """``hidden``: the share of what is sent between kernels that others run beside."""

    def __init__(self, rates: Rates, network: Network, hidden: float = 0.0) -> None:
        super().__init__()
        self.rates = rates
        self.network = network
        self.hidden = hidden
        self.now = Elapsed()
        self.at: dict[Hashable, tuple[float, str]] = {}  # when a mark is reached, and the axis last sent along
        self.axis: dict[str, str] = {}
        self.contention = shipped()["contention"] if rates.cuda else 0.0
        self.beside_s = 0.0  # of communication that has begun and slows what is computed next
        self.given_s = 0.0  # when the gradient of a stage's input was there, last

    def change(self, key: Key, category: str, size: int, tier: Tier) -> None:
        """Nothing: bytes take no time."""

    def add(self, event: Event) -> None:
        if isinstance(event, Send):
            self._send(event, 1)
        elif isinstance(event, Copy):
            seconds = self.rates.moved_s(event)
            if event.source != "device" or event.target != "device":
                self.now.at_s[event.stream] += seconds
            elif event.stream == "compute":
                self._compute(seconds, self.rates.launch_s if self.rates.cuda else 0.0)
                self.now.busy_s["copies"] += seconds
            else:
                self.now.at_s[event.stream] = max(self.now.at_s[event.stream], self.now.host_s) + seconds
        elif isinstance(event, Begin):
            self.taken()
        elif event == Mark("gradient of the input"):
            self.given_s = self.now.at_s["compute"]

    def play(self, piece: Event | Span, at: object) -> None:
        assert isinstance(piece, Span)
        if piece.busy_ns:
            self._compute(sum(piece.busy_ns.values()) / 1e9, piece.host_ns / 1e9)
            for kind, ns in piece.busy_ns.items():
                self.now.busy_s[kind] += ns / 1e9
        for send, calls in piece.sent.items():
            self._send(send, calls)

    def _compute(self, device_s: float, host_s: float) -> None:
        now = self.now
        slowed_s = min(self.beside_s, self.contention * device_s)
        self.beside_s -= slowed_s
        first_s = now.host_s + min(host_s, self.rates.launch_s)
        now.host_s += host_s
        now.at_s["compute"] = max(max(now.at_s["compute"], first_s) + device_s + slowed_s, now.host_s)

    def _send(self, send: Send, calls: int) -> None:
        now, seconds = self.now, calls * self.network.seconds(send.kind, send.axis, send.bytes)
        axis = self.network.layout.called(send.axis)
        now.sent_s[axis] += seconds
        if send.stream == "compute":
            seconds = calls * waited_s(send, self.network, self.hidden)
            now.at_s["compute"] = max(now.at_s["compute"], now.host_s) + seconds
            now.exposed_s[axis] += seconds
            return
        begins_s = max(now.at_s[send.stream], now.host_s)
        if self.rates.cuda and seconds:
            links = self.network.links(send.axis)
            begins_s = max(begins_s, now.links_s[links])
            now.links_s[links] = begins_s + seconds
        now.at_s[send.stream] = begins_s + seconds
        self.axis[send.stream] = axis
        self.beside_s += self.contention * seconds

    def record(self, stream: str, mark: Hashable) -> None:
        self.marks.add(mark)
        reached_s = max(self.now.at_s[stream], self.now.host_s)
        self.at[mark] = reached_s, self.axis.get(stream, "")

    def wait(self, stream: str, mark: Hashable) -> None:
        until_s, axis = self.at[mark]
        late_s = until_s - self.now.at_s[stream]
        if late_s > 0:
            if stream == "compute":
                self.now.exposed_s[axis] += until_s - max(self.now.at_s[stream], min(self.now.host_s, until_s))
            self.now.at_s[stream] = until_s
        if stream == "compute":  # what was sent while the device waited has slowed nothing
            going_s = [max(0.0, self.now.at_s[other] - self.now.at_s["compute"]) for other in self.axis]
            self.beside_s = min(self.beside_s, self.contention * sum(going_s))
