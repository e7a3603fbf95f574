"""The moments when gradients, inputs of blocks and weights leave the device, and when they come, on paper.

:class:`LeavingGradients` and :class:`ComingWeights` do what host_copies.py does, the latter also what weights.py does,
and :class:`WaitingInputs` what activations.py does. No torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any

from shardwise.spec.plan import Plan
from shardwise.spec.sheet import Sheet
from shardwise.techniques.between import Between, Gradients
from shardwise.techniques.events import (
    DISK,
    ON_HOST,
    OUTPUT,
    TO_DEVICE,
    TO_HOST,
    Begin,
    Copy,
    EventLog,
    TensorKey,
    UnitName,
)
from shardwise.techniques.offload.legal import leave_early, return_beside
from shardwise.techniques.offload.sizes import ROOMS, STAGED_BLOCKS, whole_pages
from shardwise.techniques.offload.tiers import elsewhere, leaving, trained_of, waiting

ADDED = 3
"""How often the host reads or writes a number that it adds to another."""


class LeavingGradients(Gradients):
    """Gradients on their way to the host, where it updates weights."""

    def __init__(self, log: EventLog, sheet: Sheet, plan: Plan) -> None:
        self.staying: set[UnitName] = {i for i, kind in enumerate(sheet.order) if sheet.blocks[kind].stays}
        if sheet.embedding.stays:
            self.staying.add("embedding")
        self.log, self.on_host = log, plan.offload.optimizer != "none"
        self.early, self.sums = leave_early(plan), plan.offload.sums == "host"
        self.leaves: dict[Hashable, tuple[UnitName, int | None]] = {}  # of each its unit, and what of it is copied
        self.bucketed: dict[Hashable, tuple[Hashable, ...]] = {}  # the gradients that a bucket has
        self.going: Hashable = None  # what has left last, and is there until the next has

    def whole(self, unit: UnitName, key: Hashable, size: int, *, last: bool, summed: Hashable = None) -> None:
        """Have it leave in the ``last`` backward, or in each where the host adds them up, if it may already; by then
        the one before it has left."""
        if not self.on_host:
            return
        adds, moves = self.sums and key in self.leaves, unit not in self.staying
        self.leaves[key] = unit, size if moves else None
        if moves and self.early and (last or self.sums):
            if self.going is not None:
                self.log.free(self.going)
            self.going = key
            self._copy(size, summed)
            if adds:
                self.log.follow(ON_HOST, "adds", TO_HOST)
                self.log.add(Copy("host", "host", ADDED * size, ON_HOST))

    def flattened(self, bucket: Hashable, keys: tuple[Hashable, ...]) -> None:
        self.bucketed[bucket] = keys

    def kept(self) -> Hashable:
        return tuple(self.leaves.items()), tuple(self.bucketed.items())

    def restore(self, kept: Any) -> None:
        self.leaves, self.bucketed = map(dict, kept)

    def end_step(self) -> None:
        """Have the rest leave, one unit's after another's. A bucket is there until all of it has left."""
        of_unit: dict[UnitName, dict[Hashable, tuple[int, bool]]] = {}
        for key in self.log.alive:
            each = [self.leaves[one] for one in self.bucketed.get(key, (key,)) if one in self.leaves]
            sizes = [size for _, size in each if size is not None]
            if sizes:
                of_unit.setdefault(each[-1][0], {})[key] = sum(sizes), len(sizes) == len(each)
        for unit, gradients in of_unit.items():
            self.log.add(Begin("leaving", unit))
            for key, (size, all_of_it) in gradients.items():
                if all_of_it:
                    self.log.free(key)
                if key != self.going:
                    self._copy(size)
        self.going = None

    def _copy(self, size: int, after: Hashable = None) -> None:
        """Behind this mark, or what has been computed so far."""
        if after is None:
            self.log.follow(TO_HOST, "leaves")
        else:
            self.log.wait(TO_HOST, after)
        self.log.add(Copy("device", "host", size, TO_HOST))


class ComingWeights(Between):
    """Weights on their way to the device: those that the host has updated in the step before, and those of a stage's
    blocks that wait there or in a file."""

    def __init__(self, log: EventLog, sheet: Sheet, plan: Plan) -> None:
        self.log = log
        self.stays = plan.layout.pp == 1
        self.in_file = plan.offload.weights == "nvme"
        self.waiting, self.read = waiting(sheet, plan), list[int]()  # read: since the backward before, in a file
        self.readers = ["gather"] * plan.sharded
        backward = [bool(block.backward) for block in sheet.blocks]
        self.backward = {number for number, kind in enumerate(sheet.order) if backward[kind]}
        self.returned: dict[UnitName, tuple[int, int]] = {}  # bytes that are copied, and that the host casts
        if return_beside(plan):
            units = elsewhere(sheet).units
            each = [trained_of(unit, sheet.rank_kind, plan.precision.weights)[3:] for unit in units]
            ends = (each[0][0] + each[-1][0], each[0][1] + each[-1][1])
            self.returned = {"embedding": ends, **{number: each[1 + kind] for number, kind in enumerate(sheet.order)}}

    def before_forward(self, name: UnitName, at: TensorKey) -> None:
        if name in self.returned and at.micro_batch == 0:
            self._return(name)
        if self.waiting and isinstance(name, int):
            self._come(name)
            self._await(("waiting", name))
            self._come(name + 1)

    def _return(self, name: UnitName) -> None:
        if name == "embedding":
            self.log.record("compute", "weights updated")
            for stream in (ON_HOST, TO_DEVICE):
                self.log.wait(stream, "weights updated")
        size, cast = self.returned[name]
        if cast:
            self.log.add(Copy("host", "host", cast, ON_HOST))
            self.log.follow(TO_DEVICE, ("cast", name), ON_HOST)
        if size:
            self.log.add(Copy("host", "device", size, TO_DEVICE))
            self.log.record(TO_DEVICE, ("returned", name))
            self._await(("returned", name))

    def after_forward(self, name: UnitName, at: TensorKey) -> None:
        if self.waiting and (name != len(self.waiting) - 1 or name not in self.backward or not self.stays):
            self.log.drop(("waiting", name))

    def before_backward(self, name: UnitName, at: TensorKey) -> None:
        if self.waiting and isinstance(name, int):
            self.log.drop(("waiting", name + 1))
            self._come(name)
            self._await(("waiting", name))
            if name - 1 in self.backward:
                self._come(name - 1)
                self._await(("waiting", name - 1), computes=False)

    def end(self) -> None:
        """Let go of the weights that backward has read last."""
        for name in range(len(self.waiting)):
            self.log.drop(("waiting", name))
        self.read = []

    def _come(self, name: int) -> None:
        if name >= len(self.waiting) or ("waiting", name) in self.log.alive:
            return
        padded, exact, _ = self.waiting[name]
        self.log.make(("waiting", name), "gathered", padded)
        if self.in_file:  # into the room out of which the block before the one before it has been copied
            used = ("waiting", self.read[-STAGED_BLOCKS]) if len(self.read) >= STAGED_BLOCKS else None
            if used:
                self.log.wait(DISK, used)
            else:
                self.log.follow(DISK, ("given", "read", name))
            self.log.add(Copy("disk", "host", exact, DISK))
            self.log.follow(TO_DEVICE, ("read", name), DISK)
            self.read.append(name)
        self.log.copies(Copy("host", "device", exact, TO_DEVICE), ("waiting", name))

    def _await(self, mark: Hashable, *, computes: bool = True) -> None:
        for stream in [*["compute"] * computes, *self.readers]:
            self.log.wait(stream, mark)


class WaitingInputs(Between):
    """The inputs of a stage's blocks that leave, and come back for their backward."""

    def __init__(self, log: EventLog, sheet: Sheet, plan: Plan, stage: int) -> None:
        leave = leaving([sheet.blocks[kind] for kind in sheet.order], plan, first_stays=stage > 0)
        self.log, self.filed = log, plan.offload.activations == "nvme"
        self.sizes = {1 + place: size for place, (size, _) in leave.items()}
        self.before = {1 + later: 1 + place for place, (_, later) in leave.items()}
        self.used = deque[Hashable](maxlen=ROOMS)
        # Autograd holds the gradient that a stage is given until its backward is over, where that comes at once.
        whole = not plan.pipeline.spec.splits_backward
        self.given = max(self.sizes.values(), default=0) if whole and stage < len(plan.pipeline.split) - 1 else 0
        self.last = len(sheet.order)

    def before_forward(self, name: UnitName, at: TensorKey) -> None:
        """An input leaves beside the forward that reads it."""
        if size := self.sizes.get(at.unit):
            self._take_room(("written", *at[:3]))
            self.log.copies(Copy("device", "host", size, TO_HOST), ("left", *at[:3]))
            if self.filed:
                self.log.copies(Copy("host", "disk", whole_pages(size), DISK), ("written", *at[:3]), TO_HOST)

    def after_forward(self, name: UnitName, at: TensorKey) -> None:
        """Wait until the input has left, and free it."""
        if size := self.sizes.get(at.unit):
            self.log.wait("compute", ("left", *at[:3]))
            self.log.leaves(at._replace(unit=at.unit - 1, tensor=OUTPUT), size)

    def before_backward(self, name: UnitName, at: TensorKey) -> None:
        """The backward of a unit begins with its input, and that of the block before it comes beside it."""
        if self.given and at.unit == self.last - 1:
            self.log.hold(("given", at.stage), "activations", self.given)
        elif at.unit == 0:
            self.log.drop(("given", at.stage))
        if at.unit in self.sizes:
            self.log.wait("compute", ("come", *at[:3]))
        if at.unit in self.before:
            self._come(at._replace(unit=self.before[at.unit]))

    def _come(self, at: TensorKey) -> None:
        size, behind = self.sizes[at.unit], "compute"
        self.log.comes(at._replace(unit=at.unit - 1, tensor=OUTPUT), size)
        self._take_room(("come", *at[:3]))
        if self.filed:
            self.log.copies(Copy("disk", "host", whole_pages(size), DISK), ("read", *at[:3]))
            behind = DISK
        self.log.copies(Copy("host", "device", size, TO_DEVICE), ("come", *at[:3]), behind)

    def _take_room(self, mark: tuple[Hashable, ...]) -> None:
        """Take a room until ``mark`` for what passes through it; the host launches nothing before one is free."""
        if self.filed:
            if len(self.used) == ROOMS:
                self.log.wait("compute", self.used[0])
            self.used.append(mark)
