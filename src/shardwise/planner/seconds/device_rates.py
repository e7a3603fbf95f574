"""Measurements of ``shardwise doctor`` on GPUs that others have too: ``devices.json`` beside this file, by their names
in ``spec/hardware.csv``. It stands in for the table where a user has such a GPU and no file of his own. Only what a
device computes is there: hosts, disks and links differ. ``python bench/devices.py FILE ...`` makes it from files of
doctor."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from shardwise.spec.measured import AttentionTime, Measured, Pointwise, Product

KINDS: dict[str, type[Product] | type[AttentionTime] | type[Pointwise]] = {
    "products": Product,
    "attention": AttentionTime,
    "pointwise": Pointwise,
}


@cache
def measured_on(name: str) -> Measured | None:
    """Return what was measured on the device of this name; None where nobody has."""
    known = _known().get(name)
    if known is None:
        return None
    each: dict[str, Any] = {key: tuple(kind(*row) for row in known[key]) for key, kind in KINDS.items()}
    return Measured(**each)


@cache
def _known() -> dict[str, dict[str, list[list[Any]]]]:
    found: dict[str, dict[str, list[list[Any]]]] = json.loads(
        files("shardwise.planner.seconds").joinpath("devices.json").read_text(encoding="utf-8")
    )
    return found
