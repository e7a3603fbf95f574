"""The events of a step in their order: tensors are made, moved and freed, operations run, messages are sent. Bytes,
traffic and operations are sums over one and the same list (planner/spans.py)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, NamedTuple

from shardwise.spec.sheet import Tensor, Tier

Key = Hashable
Direction = Literal["forward", "backward", "leaving"]
"""Of a pass of a unit; what leaves after all passes comes last, unit by unit."""
UnitName = int | Literal["stem", "tail"]
"""A block's number, or an end of the model."""


class TensorKey(NamedTuple):
    """A tensor of the pass of a unit, whose number in its stage is counted from the model's stem, 0."""

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
"""A point in the pass of a unit at which planner/weights.py adds events of its own."""
