"""The moments when gradients leave the device, where the optimizer is on the host, and when what it has updated
returns; when inputs of blocks leave, which come back; and when weights come that wait there."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from itertools import accumulate, pairwise

from shardwise.planner.events import Begin, Copy, TensorKey, UnitName
from shardwise.planner.passes import OUTPUT
from shardwise.planner.tape import Tape
from shardwise.spec.plan import Plan
from shardwise.spec.sheet import Sheet, Unit
from shardwise.techniques import pp
from shardwise.techniques.offload import blocks_again, leaving, waiting_bytes
from shardwise.techniques.offload.legal import leave_early, return_beside
from shardwise.techniques.offload.sizes import ROOMS, STAGED_BLOCKS, whole_pages
from shardwise.techniques.offload.updated import elsewhere, return_bytes
from shardwise.techniques.shard.unit_bytes import ExpertsOf

ADDED = 3
"""How often the host reads or writes a number that it adds to another."""


class Leaving:
    """As techniques/offload/host.py does it; nothing where the optimizer is on the device."""

    def __init__(self, tape: Tape, sheet: Sheet, plan: Plan) -> None:
        names: list[UnitName] = ["stem", *range(len(sheet.order))]
        units = sheet.stem, *(sheet.blocks[kind] for kind in sheet.order)
        self.staying = {name for name, unit in zip(names, units, strict=True) if unit.stays}
        self.tape, self.on_host, self.early = tape, plan.offload.optimizer != "none", leave_early(plan)
        self.sums = plan.offload.sums == "host"
        self.sizes: dict[Hashable, int] = {}  # what of each is copied, where that is not all of it
        self.before: list[Hashable] = []
        self.bucketed: dict[Hashable, list[Hashable]] = {}  # the gradients that a bucket has

    def whole(self, key: Hashable, size: int, *, last: bool, summed: Hashable = None) -> None:
        """A gradient of a backward is whole, where others add to it at the mark ``summed``, and in the ``last``, or in
        each where the host adds them up, leaves if it may already, by when the one before it has left; ``size`` bytes
        of it are copied."""
        if _unit_of(key) in self.staying:
            return
        adds = self.sums and key in self.sizes
        self.sizes[key] = size
        if self.early and (last or self.sums):
            for gone in self.before:
                self.tape.free(gone)
            self.before = [key]
            self._copy(size, summed)
            if adds:
                self.tape.record("out", "adds")
                self.tape.wait("adds", "adds")
                self.tape.add(Copy("host", "host", ADDED * size, "adds"))

    def rest(self) -> None:
        """After the last backward of a step: what has not left, leaves, that of a unit after that of another. A bucket
        is there until all of it has."""
        of_unit: dict[UnitName, dict[Hashable, int]] = {}
        staying = set[Hashable]()
        for key, (category, size, tier) in self.tape.alive.items() if self.on_host else ():
            if category == "gradients" and tier == "device":
                each = self.bucketed.get(key, [key])
                leaves = [one for one in each if _unit_of(one) not in self.staying]
                if len(leaves) < len(each):
                    staying.add(key)
                if leaves:
                    whole = self.sizes.get(key, size) if key not in staying else sum(self.sizes[one] for one in leaves)
                    of_unit.setdefault(_unit_of(each[-1]), {})[key] = whole
        for unit, sizes in of_unit.items():
            self.tape.add(Begin("leaving", unit))
            for key, size in sizes.items():
                if key not in staying:
                    self.tape.free(key)
                if key not in self.before:
                    self._copy(size)
        self.before = []

    def _copy(self, size: int, after: Hashable = None) -> None:
        """Behind this mark, or what has been computed so far."""
        if after is None:
            after = "leaves"
            self.tape.record("compute", after)
        self.tape.wait("out", after)
        self.tape.add(Copy("device", "host", size, "out"))


def _unit_of(key: Hashable) -> UnitName:
    """Return the block that the gradient under a key ("grad", what) is in, or "stem" for both ends of the model."""
    assert isinstance(key, tuple)
    group = key[1].block if isinstance(key[1], ExpertsOf) else key[1]
    if isinstance(group, str) and group.startswith("layers."):
        return int(group.split(".")[1])
    return group if isinstance(group, int) else "stem"


class Returning:
    """As techniques/offload/returned.py does it, before the first micro-batch's forward and within it: weights that the
    host has updated in the step before."""

    def __init__(self, tape: Tape, sheet: Sheet, plan: Plan) -> None:
        self.tape, self.sharded = tape, plan.sharded
        self.sizes: dict[UnitName, tuple[int, int]] = {}  # bytes that are copied, and that the host reads and writes
        if return_beside(plan):
            units = elsewhere(sheet).units
            stem, *kinds, tail = (return_bytes(unit, sheet.place, plan.precision.weights) for unit in units)
            self.sizes = {"stem": (stem[0] + tail[0], stem[1] + tail[1])}
            self.sizes |= {number: kinds[kind] for number, kind in enumerate(sheet.order)}

    def before_forward(self, name: UnitName, micro_batch: int) -> None:
        if micro_batch or name not in self.sizes:
            return
        if name == "stem":
            self.tape.record("compute", "weights updated")
            for stream in ("adds", "home"):
                self.tape.wait(stream, "weights updated")
        size, cast = self.sizes[name]
        if cast:
            self.tape.add(Copy("host", "host", cast, "adds"))
            self.tape.record("adds", ("cast", name))
            self.tape.wait("home", ("cast", name))
        if size:
            self.tape.add(Copy("host", "device", size, "home"))
            self.tape.record("home", ("returned", name))
            for stream in ["compute"] + ["gather"] * self.sharded:
                self.tape.wait(stream, ("returned", name))


class Inputs:
    """The inputs that leave, of the blocks among a stage's ``units``, as techniques/offload/activations.py does it."""

    def __init__(self, tape: Tape, units: Sequence[Unit], plan: Plan, number: int) -> None:
        """``number``: the stage's."""
        self.tape = tape
        again = [1 + place for place in blocks_again(units[1:-1])] if plan.offload.activations != "none" else []
        self.filed, self.used = plan.offload.activations == "nvme", deque[Hashable](maxlen=ROOMS)
        self.before = {later: earlier for earlier, later in pairwise(again)}
        b, s = plan.batch.micro_batch_size, plan.row_tokens
        leave = [1 + place for place in leaving(units[1:-1], first_stays=number > 0)] if again else []
        self.sizes = {unit: units[unit].tensors[units[unit].input].bytes(b, s) for unit in leave}
        # Autograd holds the gradient that a stage is given until its backward is over, where that comes at once.
        whole = not plan.pipeline.spec.splits_backward
        self.given = max(self.sizes.values(), default=0) if whole and number < len(plan.pipeline.split) - 1 else 0
        self.last = len(units) - 2

    def begins(self, unit: TensorKey) -> None:
        """The forward of a unit, whose input leaves beside it."""
        if size := self.sizes.get(unit.unit):
            self._takes_room(("written", *unit[:3]))
            _copy(self.tape, Copy("device", "host", size, "out"), ("left", *unit[:3]))
            if self.filed:
                _copy(self.tape, Copy("host", "disk", whole_pages(size), "disk"), ("written", *unit[:3]), behind="out")

    def ends(self, unit: TensorKey) -> None:
        """Wait, as the forward of a unit ends, until its input has left, and free that."""
        if size := self.sizes.get(unit.unit):
            self.tape.wait("compute", ("left", *unit[:3]))
            self.tape.leaves(unit._replace(unit=unit.unit - 1, tensor=OUTPUT), size)

    def again(self, unit: TensorKey) -> None:
        """The backward of a unit begins with its input, and that of the block before it comes beside it."""
        if self.given and unit.unit == self.last - 1:
            self.tape.hold(("given", unit.stage), "activations", self.given)
        elif unit.unit == 0:
            self.tape.drop(("given", unit.stage))
        if unit.unit in self.sizes:
            self.tape.wait("compute", ("come", *unit[:3]))
        before = self.before.get(unit.unit)
        if before in self.sizes:
            at = unit._replace(unit=before)
            self.tape.comes(at._replace(unit=before - 1, tensor=OUTPUT), self.sizes[before])
            self._takes_room(("come", *at[:3]))
            behind = "compute"
            if self.filed:
                size, behind = whole_pages(self.sizes[before]), "disk"
                _copy(self.tape, Copy("disk", "host", size, "disk"), ("read", *at[:3]))
            _copy(self.tape, Copy("host", "device", self.sizes[before], "home"), ("come", *at[:3]), behind=behind)

    def _takes_room(self, mark: tuple[Hashable, ...]) -> None:
        """Take a room until ``mark`` for what passes through it; the host launches nothing before one is free."""
        if self.filed:
            if len(self.used) == ROOMS:
                self.tape.wait("compute", self.used[0])
            self.used.append(mark)


class Fetching:
    """The weights of a stage's blocks that wait on the host, as techniques/offload/weights.py has them come and go; or
    those that return."""

    def __init__(self, tape: Tape, sheet: Sheet, plan: Plan) -> None:
        self.tape, self.sharded, self.stays = tape, plan.sharded, plan.layout.pp == 1
        self.sizes, self.in_file = waiting_bytes(sheet, plan), plan.offload.weights == "nvme"
        self.returning = Returning(tape, sheet, plan)
        self.read: list[int] = []  # since the backward before, of those in a file
        order = sheet.order if self.sizes else ()
        self.backward = {number for number, kind in enumerate(order) if sheet.blocks[kind].backward}

    def before_forward(self, name: UnitName, micro_batch: int) -> None:
        self.returning.before_forward(name, micro_batch)
        if self.sizes and isinstance(name, int):
            self._come(name)
            self._await(name)
            self._come(name + 1)

    def after_forward(self, name: UnitName) -> None:
        if self.sizes and (name != len(self.sizes) - 1 or name not in self.backward or not self.stays):
            self.tape.drop(("waiting", name))

    def before_backward(self, name: UnitName) -> None:
        if self.sizes and isinstance(name, int):
            self.tape.drop(("waiting", name + 1))
            self._come(name)
            self._await(name)
            if name - 1 in self.backward:
                self._come(name - 1)
                self._await(name - 1, computes=False)

    def rest(self) -> None:
        """After a backward: what it read last."""
        for name in range(len(self.sizes)):
            self.tape.drop(("waiting", name))
        self.read = []

    def _come(self, name: int) -> None:
        if name < len(self.sizes) and ("waiting", name) not in self.tape.alive:
            padded, exact = self.sizes[name]
            self.tape.make(("waiting", name), "gathered", padded)
            if self.in_file:  # into the room out of which the block before the one before it has been copied
                used = ("waiting", self.read[-STAGED_BLOCKS]) if len(self.read) >= STAGED_BLOCKS else None
                _copy(self.tape, Copy("disk", "host", exact, "disk"), ("read", name), used)
                self.tape.wait("home", ("read", name))
                self.read.append(name)
            _copy(self.tape, Copy("host", "device", exact, "home"), ("waiting", name))

    def _await(self, name: int, *, computes: bool = True) -> None:
        for stream in ["compute"] * computes + ["gather"] * self.sharded:
            self.tape.wait(stream, ("waiting", name))


def in_flight(sheet: Sheet, plan: Plan) -> list[int]:
    """Return for each stage of a sheet's place how many forwards wait for their backward at once, at most."""
    if plan.layout.pp == 1 or plan.offload.activations == "none":
        return [1] * max(1, len(sheet.place.stages))
    order, found = pp.orders(plan, sheet.trained)[sheet.place.coordinate("pp")], list[int]()
    for stage in sheet.place.stages:
        kinds = [action.kind for action in order if action.stage == stage.number and action.kind in "FBI"]
        found.append(max(accumulate(1 if kind == "F" else -1 for kind in kinds)))
    return found


def _copy(
    tape: Tape, copy: Copy, mark: tuple[Hashable, ...], after: Hashable = None, *, behind: str = "compute"
) -> None:
    """After this mark, or what has been computed so far, or been done on another stream."""
    if after is None:
        after = ("given", *mark)
        tape.record(behind, after)
    tape.wait(copy.stream, after)
    tape.add(copy)
    tape.record(copy.stream, mark)
