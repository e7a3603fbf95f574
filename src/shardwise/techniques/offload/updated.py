"""The numbers and bytes that leave and return at the place of a sheet for what the host updates, on paper. No torch."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from shardwise.spec.place import Place
from shardwise.spec.plan import BYTES, Dtype, Plan
from shardwise.spec.sheet import KEPT_UNITS, Sheet, Unit
from shardwise.techniques.offload.legal import return_beside


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


def trained_bytes(sheet: Sheet, plan: Plan) -> int:
    """Return the bytes of the trained weights at the sheet's place, without padding, whose gradients are copied to the
    host."""
    return trained_numbers(elsewhere(sheet)) * BYTES[plan.precision.weights]


def copied_bytes(sheet: Sheet, plan: Plan) -> int:
    """Return the bytes of the copies of trained weights that the device has too: of those that do not wait on the
    host."""
    wide = BYTES[plan.precision.weights]
    return sum(wide * times * _trained(unit, sheet.place) for unit, times in _returned(sheet, plan))


def returned_bytes(sheet: Sheet, plan: Plan) -> tuple[int, int]:
    """Return the bytes that are copied to the device after the step, in the dtype that it has; and those that the host
    reads and writes where that is another."""
    each = [(times, return_bytes(unit, sheet.place, plan.precision.weights)) for unit, times in _returned(sheet, plan)]
    return sum(times * copied for times, (copied, _) in each), sum(times * cast for times, (_, cast) in each)


def returned_late(sheet: Sheet, plan: Plan) -> int:
    """Return how many of the bytes that are copied to the device come before the next forward, and not within it."""
    return 0 if return_beside(plan) else returned_bytes(sheet, plan)[0]


def _returned(sheet: Sheet, plan: Plan) -> list[tuple[Unit, int]]:
    """Return the units whose weights the host updates and the device gets, and how many there are of each."""
    if plan.offload.optimizer == "none":
        return []
    return elsewhere(sheet).repeated() if plan.offload.weights == "none" else [(sheet.stem, 1), (sheet.tail, 1)]


@lru_cache(maxsize=8 * KEPT_UNITS)
def return_bytes(unit: Unit, place: Place, updated: Dtype) -> tuple[int, int]:
    """Return the bytes of a unit's trained weights, without padding, that are copied to the device, and those that the
    host reads and writes where that is in another dtype than they are ``updated`` in."""
    copied = cast = 0
    for weight in unit.weights:
        if weight.trained:
            numbers = weight.local_numel(place, padded=False)
            copied += numbers * BYTES[weight.dtype]
            cast += numbers * (BYTES[updated] + BYTES[weight.dtype]) * (weight.dtype != updated)
    return copied, cast


def largest_bytes(sheet: Sheet, plan: Plan) -> int:
    """Return the bytes of the largest weight at the sheet's place that the host updates, without padding."""
    return max(_largest(unit, sheet.place) for unit in elsewhere(sheet).units) * BYTES[plan.precision.weights]


@lru_cache(maxsize=8 * KEPT_UNITS)
def _largest(unit: Unit, place: Place) -> int:
    return max((weight.local_numel(place, padded=False) for weight in unit.weights if weight.trained), default=0)


def trained_numbers(sheet: Sheet) -> int:
    """Return how many numbers the trained weights at the sheet's place have, without padding."""
    return sum(times * _trained(unit, sheet.place) for unit, times in sheet.repeated())


@lru_cache(maxsize=8 * KEPT_UNITS)
def _trained(unit: Unit, place: Place) -> int:
    return sum(weight.local_numel(place, padded=False) for weight in unit.weights if weight.trained)
