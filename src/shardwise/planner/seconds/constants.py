"""The constants behind seconds, each with its meaning: ``constants.csv`` beside this file.

Shares are of what ``spec/hardware.csv`` says of a device. One set serves all models and layouts: what differs is the
device, the software's era and the traits of a program (eager or fused blocks, the attention kernel).
"""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files

Constants = dict[str, float]


@cache
def shipped() -> Constants:
    """The constants by name."""
    with files("shardwise.planner.seconds").joinpath("constants.csv").open(encoding="utf-8") as stream:
        return {row["constant"]: float(row["value"]) for row in csv.DictReader(stream)}


@cache
def meanings() -> dict[str, str]:
    """What each constant is."""
    with files("shardwise.planner.seconds").joinpath("constants.csv").open(encoding="utf-8") as stream:
        return {row["constant"]: row["meaning"] for row in csv.DictReader(stream)}
