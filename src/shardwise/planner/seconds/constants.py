"""The constants behind seconds, each with its meaning: ``constants.csv`` beside this file.

Shares are of what ``spec/hardware.csv`` says of a device. One set serves all models and layouts: what differs is the
device, the software's era and the traits of a program (eager or fused blocks, the attention kernel). Those with a prior
are fitted to published measurements (``python -m bench.accuracy.fit``, in a clone): ``sigma`` is how far, in logs, a
constant may reasonably be from its prior.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files

Constants = dict[str, float]


@cache
def shipped() -> Constants:
    """The constants by name."""
    return {row["constant"]: float(row["value"]) for row in rows()}


def rows() -> list[dict[str, str]]:
    """The lines of the file: constant, value, prior, sigma, meaning."""
    with files("shardwise.planner.seconds").joinpath("constants.csv").open(encoding="utf-8") as stream:
        return [*csv.DictReader(stream)]
