"""What a step does, as events in their order: tensors are made and freed, operations run, messages are sent. Bytes,
traffic and operations are sums over one and the same list (planner/spans.py)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from shardwise.spec.sheet import Tensor

Key = Hashable


class Make(NamedTuple):
    """``bytes`` of a category of memory come into being under ``key``."""

    key: Key
    category: str
    bytes: int


class Free(NamedTuple):
    """What stands under ``key`` is freed; ``category`` and ``bytes`` are those it was made with."""

    key: Key
    category: str
    bytes: int


class Compute(NamedTuple):
    """Floating-point operations of one kernel."""

    flops: int
    stream: str = "compute"


class Send(NamedTuple):
    """One collective over the ranks of a group, ``axis``; ``bytes`` is what is gathered, scattered or reduced. In the
    stream ``compute`` the operations after it wait for it; in another it runs beside them."""

    kind: str
    axis: str
    category: str
    bytes: int
    stream: str = "compute"


class Mark(NamedTuple):
    """A moment that has a name."""

    name: Hashable


class WeightsCall(NamedTuple):
    """Within the pass of a unit: the weights are told of something, and may add events of their own."""

    method: str
    weight: Tensor | None = None


Event = Make | Free | Compute | Send | Mark
