"""The events of a step in their order: tensors are made, moved and freed, operations run, messages are sent; and the
log that they are written to. Bytes, traffic and operations are sums over one and the same list (planner/spans.py)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, NamedTuple

from shardwise.spec.sheet import Tensor, Tier

Key = Hashable
Direction = Literal["forward", "backward", "leaving"]
"""Of a pass of a unit; what leaves after all passes comes last, unit by unit."""
OUTPUT, GRADIENT = "output", "gradient of output"
"""Keys of a unit's output, and of its gradient."""
UnitName = int | Literal["embedding", "head"]
"""A block's number, or an end of the model."""
TO_HOST, TO_DEVICE, ON_HOST, DISK = "to host", "to device", "host", "disk"
"""Streams beside the device's: copies each way over the bus, what the host computes, and what goes to files and from
there."""


class TensorKey(NamedTuple):
    """A tensor of the pass of a unit, whose number is counted in its stage, from 0, what runs before its blocks."""

    stage: int
    micro_batch: int
    unit: int
    tensor: int | str


class Make(NamedTuple):
    """``bytes`` of a category of memory come into being under ``key``, on a tier."""

    key: Key
    category: str
    bytes: int
    tier: Tier = "device"


class Free(NamedTuple):
    """The end of what stands under ``key``; ``category``, ``bytes`` and ``tier`` are those that it was made with."""

    key: Key
    category: str
    bytes: int
    tier: Tier = "device"


class Compute(NamedTuple):
    """Floating-point operations of one kernel, or none; how long the device computes it, of which kind it is
    (products, attention, pointwise), and how long the host launches it."""

    flops: int
    device_ns: int = 0
    host_ns: int = 0
    kind: str = "products"
    stream: str = "compute"


class Send(NamedTuple):
    """One collective over the ranks of a group, ``axis``; ``bytes`` is what is gathered, scattered or reduced. What
    is in one stream runs in order; what is in another runs beside it, but for what a ``Wait`` says. ``beside_ns``: so
    long the device computes meanwhile, of what is told before or after."""

    kind: str
    axis: str
    category: str
    bytes: int
    stream: str = "compute"
    beside_ns: int = 0


class Copy(NamedTuple):
    """``bytes`` are copied from one tier to another, or within one, where there is room for them already."""

    source: Tier
    target: Tier
    bytes: int
    stream: str = "compute"


class Record(NamedTuple):
    """``mark`` stands in a stream behind all that it has been given so far, as a CUDA event does; recorded again, it
    stands for the later moment."""

    stream: str
    mark: Hashable


class Wait(NamedTuple):
    """A wait of a stream: what it is given from here on begins only after ``mark``, as it was recorded last."""

    stream: str
    mark: Hashable


class Begin(NamedTuple):
    """The beginning of a pass: from here on the rank computes the forward or backward of one unit, of this micro-batch
    and pipeline stage, or its gradients leave."""

    direction: Direction
    unit: UnitName
    micro_batch: int = 0
    stage: int = 0


class Mark(NamedTuple):
    """A moment that has a name."""

    name: str


Event = Make | Free | Compute | Send | Copy | Record | Wait | Begin | Mark


class GradientReady(NamedTuple):
    """Autograd has the gradient of a weight, for this micro-batch."""

    weight: Tensor


class HeadGradientReady(NamedTuple):
    """The loss has made the gradient of the output layer's weight."""


class AddTiedGradients(NamedTuple):
    """Autograd adds the two gradients of a tied weight."""


class ExpertsRun(NamedTuple):
    """The experts of a block begin, or end: their forward or their backward."""

    which: Literal["forward", "backward"]
    begins: bool


WeightsCall = GradientReady | HeadGradientReady | AddTiedGradients | ExpertsRun
"""A point in the pass of a unit at which the technique that shards adds events of its own."""


class EventLog:
    """The events so far, and category, bytes and tier of what is alive; what has no bytes makes no event."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.alive: dict[Key, tuple[str, int, Tier]] = {}
        self.marks: set[Hashable] = set()

    def add(self, event: Event) -> None:
        self.events.append(event)

    def record(self, stream: str, mark: Hashable) -> None:
        self.marks.add(mark)
        self.add(Record(stream, mark))

    def wait(self, stream: str, mark: Hashable) -> None:
        """Raises KeyError where ``mark`` has not been recorded: it would be waited for in vain."""
        if mark not in self.marks:
            raise KeyError(f"{stream} waits for {mark}, which has not been recorded")
        self.add(Wait(stream, mark))

    def follow(self, stream: str, mark: Hashable, other: str = "compute") -> None:
        """Have a stream wait for all that the ``other`` has been given so far, where ``mark`` is recorded."""
        self.record(other, mark)
        self.wait(stream, mark)

    def copies(self, copy: Copy, mark: Hashable, behind: str = "compute") -> None:
        """Add a copy after all that another stream has been given so far; ``mark`` stands behind it."""
        self.follow(copy.stream, ("before", mark), behind)
        self.add(copy)
        self.record(copy.stream, mark)

    def make(self, key: Key, category: str, size: int, tier: Tier = "device") -> None:
        """Raises KeyError where ``key`` is alive already."""
        if key in self.alive:
            raise KeyError(f"{key} is made, but it is alive already")
        self.alive[key] = (category, size, tier)
        if size:
            self.change(key, category, size, tier)

    def hold(self, key: Key, category: str, size: int) -> None:
        """Make ``key``, unless it is there already: what is added to."""
        if key not in self.alive:
            self.make(key, category, size)

    def free(self, key: Key) -> None:
        """Raises KeyError where ``key`` is not alive: whoever frees it has counted wrong."""
        if key not in self.alive:
            raise KeyError(f"{key} is freed, but it is not alive")
        category, size, tier = self.alive.pop(key)
        if size:
            self.change(key, category, -size, tier)

    def drop(self, key: Key) -> None:
        """Free ``key``, if it is there."""
        if key in self.alive:
            self.free(key)

    def comes(self, key: TensorKey, size: int) -> None:
        """A tensor of a pass has come from another rank, or from the host."""
        self.make(key, "activations", size)

    def leaves(self, key: TensorKey, size: int) -> None:
        """One has left for another rank, or for the host."""
        self.free(key)

    def change(self, key: Key, category: str, size: int, tier: Tier) -> None:
        """Make so many bytes; free them, where ``size`` is negative."""
        self.add(Make(key, category, size, tier) if size > 0 else Free(key, category, -size, tier))


class StageLog(EventLog):
    """The part of a log that is one stage's: its weights have keys, and its streams marks, of their own."""

    def __init__(self, whole: EventLog, stage: int) -> None:
        super().__init__()
        self.whole, self.stage = whole, stage

    def add(self, event: Event) -> None:
        self.whole.add(event)

    def record(self, stream: str, mark: Hashable) -> None:
        self.whole.record(stream, (self.stage, mark))

    def wait(self, stream: str, mark: Hashable) -> None:
        self.whole.wait(stream, (self.stage, mark))

    def change(self, key: Key, category: str, size: int, tier: Tier) -> None:
        self.whole.change((self.stage, key), category, size, tier)
