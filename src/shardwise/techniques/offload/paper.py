"""What is kept outside the device, on paper: the bytes on each tier, and when they leave the device and come.

:class:`LeavingGradients` does what host.py does, :class:`ComingWeights` what returned.py and weights.py do, and
:class:`WaitingInputs` what activations.py does. No torch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from shardwise.spec.place import Place
from shardwise.spec.plan import BYTES, Dtype, Plan
from shardwise.spec.sheet import KEPT_UNITS, Sheet, Tier, Unit
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
from shardwise.techniques.offload.sizes import (
    BUFFER_BYTES,
    PAGE_BYTES,
    ROOMS,
    STAGED_BLOCKS,
    SUM_BUFFERS,
    whole_pages,
)

ADDED = 3
"""How often the host reads or writes a number that it adds to another."""


@lru_cache(maxsize=8 * KEPT_UNITS)
def staying(unit: Unit) -> Unit:
    """Return the unit as one that the device updates."""
    return replace(unit, stays=True)


def elsewhere(sheet: Sheet) -> Sheet:
    """Return the sheet without the weights that the device updates where the host updates others."""
    return sheet.rewritten(_moved) if any(unit.stays for unit in sheet.units) else sheet


@lru_cache(maxsize=8 * KEPT_UNITS)
def _moved(unit: Unit) -> Unit:
    return replace(unit, weights=()) if unit.stays else unit


class Trained(NamedTuple):
    """Trained weights at a place, without padding: how many, their numbers, and those of the largest; the bytes that
    are copied to the device when the host has updated them, and that it reads and writes where it casts them."""

    weights: int
    numbers: int
    largest: int
    returned: int
    cast: int


@lru_cache(maxsize=8 * KEPT_UNITS)
def trained_of(unit: Unit, place: Place, updated: Dtype) -> Trained:
    """Return the trained weights of a unit. ``updated``: the dtype that they are updated in."""
    each = [(weight.local_numel(place, padded=False), weight.dtype) for weight in unit.weights if weight.trained]
    return Trained(
        weights=len(each),
        numbers=sum(count for count, _ in each),
        largest=max((count for count, _ in each), default=0),
        returned=sum(count * BYTES[dtype] for count, dtype in each),
        cast=sum(count * (BYTES[updated] + BYTES[dtype]) for count, dtype in each if dtype != updated),
    )


def trained(sheet: Sheet, plan: Plan, *, ends: bool = False) -> Trained:
    """Return the trained weights at the sheet's place; of the ``ends`` of the model alone, if so asked."""
    units = [(sheet.stem, 1), (sheet.tail, 1)] if ends else sheet.repeated()
    each = [(times, trained_of(unit, sheet.place, plan.precision.weights)) for unit, times in units]
    weights, numbers, _, returned, cast = (sum(times * one[i] for times, one in each) for i in range(5))
    return Trained(weights, numbers, max(one.largest for _, one in each), returned, cast)


def returning(sheet: Sheet, plan: Plan) -> Trained:
    """Return the trained weights that the host updates and the device has too: those that do not wait on the host."""
    return trained(elsewhere(sheet), plan, ends=plan.offload.weights != "none")


def copied_after(sheet: Sheet, plan: Plan) -> list[Copy]:
    """Return the copy of updated weights to the device that comes before the next forward, and not within it."""
    late = plan.offload.optimizer != "none" and not return_beside(plan)
    size = returning(sheet, plan).returned if late else 0
    return [Copy("host", "device", size, TO_DEVICE)] if size else []


class Waiting(NamedTuple):
    """Bytes of the weights of a block that wait on the host: with padding and without, and as whole pages of each."""

    padded: int
    exact: int
    pages: int


def waiting(sheet: Sheet, plan: Plan) -> list[Waiting]:
    """Return the weights that wait of each block in their order, at the sheet's place; of none, where all are on the
    device."""
    if plan.offload.weights == "none":
        return []
    each = [_waiting(block, sheet.place, plan.offload.optimizer != "none") for block in sheet.blocks]
    return [each[kind] for kind in sheet.order]


@lru_cache(maxsize=8 * KEPT_UNITS)
def _waiting(block: Unit, place: Place, trained: bool) -> Waiting:
    weights = [weight for weight in block.weights if trained or not weight.trained]
    padded, exact = (
        [weight.local_numel(place, padded=padded) * BYTES[weight.dtype] for weight in weights]
        for padded in (True, False)
    )
    return Waiting(sum(padded), sum(exact), sum(map(whole_pages, exact)))


def leaving(blocks: Sequence[Unit], plan: Plan, *, first_stays: bool) -> dict[int, tuple[int, int]]:
    """Return by the place of each block whose input leaves, where activations do, the bytes of that, and the place of
    the block beside whose backward it comes: of those that are computed again all but the last leave, and but the first
    of a stage that is given what another has sent (``first_stays``)."""
    if plan.offload.activations == "none":
        return {}
    again = [place for place, block in enumerate(blocks) if block.recompute and block.backward]
    b, s = plan.batch.micro_batch_size, plan.row_tokens
    sizes = [block.tensors[block.input].bytes(b, s) for block in blocks]
    return {place: (sizes[place], later) for place, later in pairwise(again) if place or not first_stays}


def inputs(sheet: Sheet, plan: Plan) -> list[list[int]]:
    """Return the bytes of the inputs of blocks that leave the device in a forward at the sheet's place, one by one, of
    each of its stages."""
    found, blocks = list[list[int]](), [sheet.blocks[kind] for kind in sheet.order]
    for stage in sheet.place.stages or (sheet.place,):
        own, blocks = blocks[: len(stage.blocks)], blocks[len(stage.blocks) :]
        found.append([size for size, _ in leaving(own, plan, first_stays=not stage.stem).values()])
    return found


def held(
    sheet: Sheet, plan: Plan, state: Mapping[str, int], moments: int, flying: Sequence[int]
) -> Mapping[tuple[Tier, str], int]:
    """Return the bytes that are kept all the time at the sheet's place, by tier and category: of its ``state``, weights
    and moments, what is not outside the device; and there of each trained weight a copy and its gradient, and the
    ``moments`` of these, with a count of 4 bytes a weight. On NVMe gradients and counts stay in memory, and the blocks
    that are on their way. ``flying``: of each stage, how many forwards are in flight at most, whose inputs wait."""
    outside, found, waits = plan.offload, Counter[tuple[Tier, str]](), waiting(sheet, plan)
    moved, back = trained(elsewhere(sheet), plan), returning(sheet, plan)
    wide, exact = BYTES[plan.precision.weights], sum(one.exact for one in waits)
    if outside.optimizer == "host":
        found["host", "weights"] = back.numbers * wide
        found["host", "gradients"] = moved.numbers * wide
        found["host", "moments"] = moments
    if outside.optimizer == "nvme":
        found["host", "gradients"] = found["disk", "weights"] = moved.numbers * wide
        found["host", "moments"] = 4 * moved.weights
        found["host", "buffers"] = BUFFER_BYTES
        found["disk", "moments"] = moments - 4 * moved.weights
    if outside.sums == "host":
        found["host", "buffers"] += SUM_BUFFERS * moved.largest * wide
    if outside.weights == "host":
        found["host", "weights"] += exact
    if outside.weights == "nvme":
        found["host", "buffers"] += _staged_bytes(sheet, waits)
        updated = (moved.numbers - back.numbers) * wide if outside.optimizer == "nvme" else 0
        found["disk", "frozen"] = exact - updated
    leave = list(zip(flying, inputs(sheet, plan), strict=True))
    if outside.activations == "host":
        found["host", "activations"] = sum(times * sum(sizes) for times, sizes in leave)
    if outside.activations == "nvme":
        found["disk", "activations"] = sum(times * sum(map(whole_pages, sizes)) for times, sizes in leave)
        rooms = sum(whole_pages(size) + PAGE_BYTES for _, sizes in leave for size in {*sizes})
        found["host", "buffers"] += ROOMS * rooms
    found["device", "weights"] = state["weights"] - sum(one.padded for one in waits)
    found["device", "moments"] = state["moments"] - moments * (outside.optimizer != "none")
    return found


def _staged_bytes(sheet: Sheet, waits: Sequence[Waiting]) -> int:
    """Return the memory of the host through which weights come from files, one a stage: whole pages for its largest
    block."""
    total, begin = 0, 0
    for stage in sheet.place.stages or (sheet.place,):
        own = waits[begin : begin + len(stage.blocks)]
        total += STAGED_BLOCKS * (max((one.pages for one in own), default=0) + PAGE_BYTES)
        begin += len(stage.blocks)
    return total


def passing(sheet: Sheet, plan: Plan) -> list[Copy]:
    """Return what is copied for one micro-batch, summed up: inputs of blocks, each way, and weights from the host: of
    each block for its forward, and for its backward, but for the last where it stays."""
    size = sum(map(sum, inputs(sheet, plan)))
    found = [Copy("device", "host", size), Copy("host", "device", size)]
    if plan.offload.activations == "nvme":
        found += [Copy("disk", "host", size), Copy("host", "disk", size)]
    waits = waiting(sheet, plan)
    again = [one.exact for one, kind in zip(waits, sheet.order, strict=bool(waits)) if sheet.blocks[kind].backward]
    fetched = sum(one.exact for one in waits) + sum(again if plan.layout.pp > 1 else again[:-1])
    found.append(Copy("host", "device", fetched))
    return [*found, Copy("disk", "host", fetched)] if plan.offload.weights == "nvme" else found


class LeavingGradients(Gradients):
    """Gradients on their way to the host, where it updates weights."""

    def __init__(self, log: EventLog, sheet: Sheet, plan: Plan) -> None:
        self.staying: set[UnitName] = {i for i, kind in enumerate(sheet.order) if sheet.blocks[kind].stays}
        if sheet.stem.stays:
            self.staying.add("stem")
        self.log, self.on_host = log, plan.offload.optimizer != "none"
        self.early, self.sums = leave_early(plan), plan.offload.sums == "host"
        self.units: dict[Hashable, UnitName] = {}
        self.sizes: dict[Hashable, int] = {}  # what of each is copied
        self.bucketed: dict[Hashable, Sequence[Hashable]] = {}  # the gradients that a bucket has
        self.going: Hashable = None  # what has left last, and is there until the next has

    def whole(self, unit: UnitName, key: Hashable, size: int, *, last: bool, summed: Hashable = None) -> None:
        """In the ``last`` backward, or in each where the host adds them up, it leaves if it may already, by when the
        one before it has left."""
        if not self.on_host:
            return
        self.units[key] = unit
        if unit in self.staying:
            return
        adds = self.sums and key in self.sizes
        self.sizes[key] = size
        if self.early and (last or self.sums):
            if self.going is not None:
                self.log.free(self.going)
            self.going = key
            self._copy(size, summed)
            if adds:
                self.log.follow(ON_HOST, "adds", TO_HOST)
                self.log.add(Copy("host", "host", ADDED * size, ON_HOST))

    def flattened(self, bucket: Hashable, keys: list[Hashable]) -> None:
        self.bucketed[bucket] = keys

    def kept(self) -> Hashable:
        buckets = ((bucket, tuple(keys)) for bucket, keys in self.bucketed.items())
        return tuple(self.units.items()), tuple(self.sizes.items()), tuple(buckets)

    def restore(self, kept: Any) -> None:
        self.units, self.sizes, self.bucketed = map(dict, kept)

    def end_step(self) -> None:
        """What has not left, leaves, that of a unit after that of another. A bucket is there until all of it has."""
        of_unit: dict[UnitName, dict[Hashable, tuple[int, bool]]] = {}
        for key, (category, _, tier) in self.log.alive.items():
            each = self.bucketed.get(key, [key])
            sizes = [self.sizes[one] for one in each if one in self.sizes]
            if category == "gradients" and tier == "device" and sizes:
                of_unit.setdefault(self.units[each[-1]], {})[key] = sum(sizes), len(sizes) == len(each)
        for unit, leaving in of_unit.items():
            self.log.add(Begin("leaving", unit))
            for key, (size, all_of_it) in leaving.items():
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
        self.log, self.stays, self.in_file = log, plan.layout.pp == 1, plan.offload.weights == "nvme"
        self.waiting, self.read = waiting(sheet, plan), list[int]()  # read: since the backward before, in a file
        self.readers = ["gather"] * plan.sharded
        backward = [bool(block.backward) for block in sheet.blocks]
        self.backward = {number for number, kind in enumerate(sheet.order) if backward[kind]}
        self.returned: dict[UnitName, tuple[int, int]] = {}  # bytes that are copied, and that the host casts
        if return_beside(plan):
            units = elsewhere(sheet).units
            each = [trained_of(unit, sheet.place, plan.precision.weights)[3:] for unit in units]
            ends = (each[0][0] + each[-1][0], each[0][1] + each[-1][1])
            self.returned = {"stem": ends, **{number: each[1 + kind] for number, kind in enumerate(sheet.order)}}

    def before_forward(self, name: UnitName, at: TensorKey) -> None:
        if name in self.returned and at.micro_batch == 0:
            self._return(name)
        if self.waiting and isinstance(name, int):
            self._come(name)
            self._await(("waiting", name))
            self._come(name + 1)

    def _return(self, name: UnitName) -> None:
        if name == "stem":
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
        """What it has read last goes."""
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
        self.log.follow(TO_DEVICE, ("given", name))
        self.log.add(Copy("host", "device", exact, TO_DEVICE))
        self.log.record(TO_DEVICE, ("waiting", name))

    def _await(self, mark: Hashable, *, computes: bool = True) -> None:
        for stream in [*["compute"] * computes, *self.readers]:
            self.log.wait(stream, mark)


class WaitingInputs(Between):
    """The inputs of blocks among a stage's ``units`` that leave, and come back for their backward."""

    def __init__(self, log: EventLog, units: Sequence[Unit], plan: Plan, stage: int) -> None:
        leave = leaving(units[1:-1], plan, first_stays=stage > 0)
        self.log, self.filed = log, plan.offload.activations == "nvme"
        self.sizes = {1 + place: size for place, (size, _) in leave.items()}
        self.before = {1 + later: 1 + place for place, (_, later) in leave.items()}
        self.used = deque[Hashable](maxlen=ROOMS)
        # Autograd holds the gradient that a stage is given until its backward is over, where that comes at once.
        whole = not plan.pipeline.spec.splits_backward
        self.given = max(self.sizes.values(), default=0) if whole and stage < len(plan.pipeline.split) - 1 else 0
        self.last = len(units) - 2

    def before_forward(self, name: UnitName, at: TensorKey) -> None:
        """An input leaves beside the forward that reads it."""
        if size := self.sizes.get(at.unit):
            self._take_room(("written", *at[:3]))
            self.log.follow(TO_HOST, ("given", *at[:3]))
            self.log.add(Copy("device", "host", size, TO_HOST))
            self.log.record(TO_HOST, ("left", *at[:3]))
            if self.filed:
                self.log.follow(DISK, ("there", *at[:3]), TO_HOST)
                self.log.add(Copy("host", "disk", whole_pages(size), DISK))
                self.log.record(DISK, ("written", *at[:3]))

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
            self.log.follow(DISK, ("given back", *at[:3]))
            self.log.add(Copy("disk", "host", whole_pages(size), DISK))
            behind = DISK
        self.log.follow(TO_DEVICE, ("asked", *at[:3]), behind)
        self.log.add(Copy("host", "device", size, TO_DEVICE))
        self.log.record(TO_DEVICE, ("come", *at[:3]))

    def _take_room(self, mark: tuple[Hashable, ...]) -> None:
        """Take a room until ``mark`` for what passes through it; the host launches nothing before one is free."""
        if self.filed:
            if len(self.used) == ROOMS:
                self.log.wait("compute", self.used[0])
            self.used.append(mark)
