"""Rows of other packages: each table takes what installed packages name in an entry point of its group. A method, an
optimizer, a schedule, a launcher or a reader comes with ``pip install`` (docs/extending.md); no torch is imported for
its row."""

from __future__ import annotations

import warnings
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints, SelectableGroups

Row = TypeVar("Row")


def with_others(group: str, kind: type[Row], ours: dict[str, Row]) -> dict[str, Row]:
    """Our rows by name, then those of installed packages, whose entry points have the names. One that cannot be loaded,
    is no row, or has a name that is taken is left out with a warning: whoever asks for it is told which there are."""
    rows = dict(ours)
    for entry in sorted(_installed().select(group=group), key=lambda entry: entry.name):
        of = f"{group}: {entry.name} of {entry.dist.name if entry.dist else entry.value}"
        try:
            row = entry.load()
        except Exception as error:
            warnings.warn(f"{of} is left out: {type(error).__name__}: {error}", stacklevel=2)
            continue
        named = vars(row).get("name", entry.name) if isinstance(row, kind) else None
        if named != entry.name or entry.name in rows:
            why = "the name is taken" if entry.name in rows else f"it is no {kind.__name__} of this name"
            warnings.warn(f"{of} is left out: {why}", stacklevel=2)
            continue
        rows[entry.name] = row
    return rows


@cache
def _installed() -> EntryPoints | SelectableGroups:  # the latter before Python 3.12
    return entry_points()
