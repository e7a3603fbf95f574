"""When gradients leave the device, where the optimizer is on the host."""

from __future__ import annotations

from collections.abc import Hashable

from shardwise.planner.events import Copy
from shardwise.planner.tape import Tape
from shardwise.spec.plan import Plan
from shardwise.techniques.offload import leave_early


class Leaving:
    """As techniques/offload/host.py does it; nothing where the optimizer is on the device."""

    def __init__(self, tape: Tape, plan: Plan) -> None:
        self.tape, self.on_host, self.early = tape, plan.offload.optimizer != "none", leave_early(plan)
        self.sizes: dict[Hashable, int] = {}  # what of each is copied, where that is not all of it
        self.before: list[Hashable] = []

    def whole(self, key: Hashable, size: int, *, last: bool, summed: Hashable = None) -> None:
        """A gradient of a backward is whole, where others add to it at the mark ``summed``, and in the ``last`` leaves
        if it may already, by when the one before it has left; ``size`` bytes of it are copied."""
        self.sizes[key] = size
        if self.early and last:
            for gone in self.before:
                self.tape.free(gone)
            self.before = [key]
            self._copy(size, summed)

    def rest(self) -> None:
        """After the last backward of a step: what has not left, leaves."""
        for key, (category, size, tier) in [*self.tape.alive.items()] if self.on_host else ():
            if category == "gradients" and tier == "device":
                self.tape.free(key)
                if key not in self.before:
                    self._copy(self.sizes.get(key, size))
        self.before = []

    def _copy(self, size: int, after: Hashable = None) -> None:
        """Behind this mark, or what has been computed so far."""
        if after is None:
            after = "leaves"
            self.tape.record("compute", after)
        self.tape.wait("out", after)
        self.tape.add(Copy("device", "host", size, "out"))
