"""Impossible numbers in a ``config.json``. Imports no torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from shardwise.errors import DataError, Problem

_TABLES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
ABOVE_ZERO = _TABLES["above_zero"]
"""Numbers that are divided by, or raised to a negative power, with a usual value of each for the message."""
NOT_NEGATIVE = _TABLES["not_negative"]
"""Numbers that are added to a variance before its square root, or are a standard deviation, or the share of a loss."""
AT_MOST: dict[str, int] = _TABLES["at_most"]
"""Far beyond every model: a plan is made layer by layer, and a model of transformers is built module by module."""
DEEPEST = 32
"""How deeply mappings may be nested in a config; those of real models have three levels."""


def check_numbers(config: dict[str, Any], name: str) -> None:
    """Raises DataError (MOD005) naming every number of a ``config.json`` that is NaN, infinite, beyond :data:`AT_MOST`
    or 64 bits, or zero or negative where that gives no finite result; MOD004 if it is nested beyond reason."""
    problems = []
    where = f"config of {name}"
    left = [(config, "", 1)]
    while left:
        values, path, depth = left.pop()
        if depth > DEEPEST:
            what, fix = f"nested more than {DEEPEST} levels deep", "take the model's own config.json"
            raise DataError(Problem("MOD004", what, where, fix))
        left += [(value, f"{path}{key}.", depth + 1) for key, value in values.items() if isinstance(value, dict)]
        for key, value in values.items():
            numbers = value if isinstance(value, list) and key in ABOVE_ZERO else [value]
            if wrong := next(filter(None, (_fault(key, number) for number in numbers)), ""):
                usual = (ABOVE_ZERO | NOT_NEGATIVE).get(key)
                fix = f"the value of the model's own config.json{f', such as {usual}' if usual else ''}"
                problems.append(Problem("MOD005", f"`{path}{key}` is {wrong}", where, fix))
    if problems:
        raise DataError(*problems)


def _fault(key: str, value: Any) -> str:
    """Return what is wrong with a number, in words; empty if nothing is, or if ``value`` is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f"a whole number of {value.bit_length():,} bits; the limit is 64"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    if value > AT_MOST.get(key, value):
        return f"{value:,}; the limit is {AT_MOST[key]:,}"
    if key in ABOVE_ZERO and value <= 0:
        return f"{value}; it must be above 0"
    return f"{value}; it must not be negative" if key in NOT_NEGATIVE and value < 0 else ""
