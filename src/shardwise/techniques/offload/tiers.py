"""The bytes that are kept outside the device, on paper, and what is copied of them. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from shardwise.spec.plan import BYTES, Dtype, Plan
from shardwise.spec.rank_kind import RankKind
from shardwise.spec.sheet import KEPT_UNITS, Sheet, Tier, Unit
from shardwise.techniques.events import TO_DEVICE, Copy
from shardwise.techniques.offload.legal import return_beside
from shardwise.techniques.offload.sizes import (
    BUFFER_BYTES,
    PAGE_BYTES,
    ROOMS,
    STAGED_BLOCKS,
    SUM_BUFFERS,
    whole_pages,
)


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
    """Trained weights on a kind of rank, without padding: how many, their numbers, and those of the largest; the bytes
    that are copied to the device when the host has updated them, and that it reads and writes where it casts them."""

    weights: int
    numbers: int
    largest: int
    returned: int
    cast: int


@lru_cache(maxsize=8 * KEPT_UNITS)
def trained_of(unit: Unit, rank_kind: RankKind, updated: Dtype) -> Trained:
    """Return the trained weights of a unit. ``updated``: the dtype that they are updated in."""
    each = [(weight.local_numel(rank_kind, padded=False), weight.dtype) for weight in unit.weights if weight.trained]
    return Trained(
        weights=len(each),
        numbers=sum(count for count, _ in each),
        largest=max((count for count, _ in each), default=0),
        returned=sum(count * BYTES[dtype] for count, dtype in each),
        cast=sum(count * (BYTES[updated] + BYTES[dtype]) for count, dtype in each if dtype != updated),
    )


def trained(sheet: Sheet, plan: Plan, *, ends: bool = False) -> Trained:
    """Return the trained weights on the sheet's kind of rank; of the ``ends`` of the model alone, if so asked."""
    units = [(sheet.embedding, 1), (sheet.head, 1)] if ends else sheet.repeated()
    each = [(times, trained_of(unit, sheet.rank_kind, plan.precision.weights)) for unit, times in units]
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


class WaitingBytes(NamedTuple):
    """Bytes of the weights of a block that wait on the host: with padding and without, and as whole pages of each."""

    padded: int
    exact: int
    pages: int


def waiting(sheet: Sheet, plan: Plan) -> list[WaitingBytes]:
    """Return the weights that wait of each block in their order, on the sheet's kind of rank; of none, where all are on
    the device."""
    if plan.offload.weights == "none":
        return []
    each = [_waiting(block, sheet.rank_kind, plan.offload.optimizer != "none") for block in sheet.blocks]
    return [each[kind] for kind in sheet.order]


@lru_cache(maxsize=8 * KEPT_UNITS)
def _waiting(block: Unit, rank_kind: RankKind, trained: bool) -> WaitingBytes:
    weights = [weight for weight in block.weights if trained or not weight.trained]
    padded, exact = (
        [weight.local_numel(rank_kind, padded=padded) * BYTES[weight.dtype] for weight in weights]
        for padded in (True, False)
    )
    return WaitingBytes(sum(padded), sum(exact), sum(map(whole_pages, exact)))


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
    """Return the bytes of the inputs of blocks that leave the device in a forward on the sheet's kind of rank, one by
    one, of each of its stages."""
    found, blocks = list[list[int]](), [sheet.blocks[kind] for kind in sheet.order]
    for stage in sheet.rank_kind.stages or (sheet.rank_kind,):
        own, blocks = blocks[: len(stage.blocks)], blocks[len(stage.blocks) :]
        found.append([size for size, _ in leaving(own, plan, first_stays=not stage.embedding).values()])
    return found


def held(
    sheet: Sheet, plan: Plan, state: Mapping[str, int], moments: int, flying: Sequence[int]
) -> Mapping[tuple[Tier, str], int]:
    """Return the bytes that are kept all the time on the sheet's kind of rank, by tier and category: of its ``state``,
    weights and moments, what is not outside the device; and there of each trained weight a copy and its gradient, and
    the ``moments`` of these, with a count of 4 bytes a weight. On NVMe gradients and counts stay in memory, and the
    blocks that are on their way. ``flying``: of each stage, how many forwards are in flight at most, whose inputs
    wait."""
    outside = plan.offload
    found = Counter[tuple[Tier, str]]()
    waits = waiting(sheet, plan)
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


def _staged_bytes(sheet: Sheet, waits: Sequence[WaitingBytes]) -> int:
    """Return the memory of the host through which weights come from files, one a stage: whole pages for its largest
    block."""
    total, begin = 0, 0
    for stage in sheet.rank_kind.stages or (sheet.rank_kind,):
        own = waits[begin : begin + len(stage.blocks)]
        total += STAGED_BLOCKS * (max((one.pages for one in own), default=0) + PAGE_BYTES)
        begin += len(stage.blocks)
    return total


class Moved(NamedTuple):
    """What is copied on a kind of rank.

    left     gradients, in the last backward
    back     weights that have been updated, of which one is rounded while the one before it is copied
    waits    whether a step waits for these
    each     in the passes of each micro-batch, summed up
    earlier  besides, in those of each micro-batch before the last
    """

    left: list[Copy]
    back: list[Copy]
    waits: bool
    each: list[Copy]
    earlier: list[Copy]


def moved(sheet: Sheet, plan: Plan) -> Moved:
    """Return what is copied in a step on the sheet's kind of rank: of inputs of blocks, each way, and of weights from
    the host, of each block for its forward, and for its backward, but for the last where it stays. From NVMe updated
    weights come while others are read."""
    left = list[Copy]()
    back = list[Copy]()
    late = not return_beside(plan)
    if plan.offload.optimizer != "none":
        left = [Copy("device", "host", trained(elsewhere(sheet), plan).numbers * BYTES[plan.precision.weights])]
        home = returning(sheet, plan)
        back = [Copy("host", "device", home.returned), *[Copy("host", "host", home.cast)] * late]
    size = sum(map(sum, inputs(sheet, plan)))
    each = [Copy("device", "host", size), Copy("host", "device", size)]
    if plan.offload.activations == "nvme":
        each += [Copy("disk", "host", size), Copy("host", "disk", size)]
    waits = waiting(sheet, plan)
    again = [one.exact for one, kind in zip(waits, sheet.order, strict=bool(waits)) if sheet.blocks[kind].backward]
    fetched = sum(one.exact for one in waits) + sum(again if plan.layout.pp > 1 else again[:-1])
    each.append(Copy("host", "device", fetched))
    each += [Copy("disk", "host", fetched)] * (plan.offload.weights == "nvme")
    earlier = left if plan.offload.sums == "host" else []
    return Moved(left, back, plan.offload.optimizer == "host" and late, each, earlier)


class Updated(NamedTuple):
    """The trained numbers that the device updates, and in how many weights; those that are updated ``elsewhere``, and
    how many of them in a file."""

    tensors: int
    numbers: int
    elsewhere: int
    filed: int


def updated(sheet: Sheet, plan: Plan) -> Updated:
    """Return what is updated on the sheet's kind of rank, and where."""
    whole, moved = trained(sheet, plan), 0
    if plan.offload.optimizer != "none":
        moved = trained(elsewhere(sheet), plan).numbers
    here = whole.numbers - moved
    filed = moved if plan.offload.optimizer == "nvme" else 0
    return Updated(whole.weights * here // max(1, whole.numbers), here, moved, filed)
