"""Relative paths of a recipe are relative to its file; what is only in the shell's directory is read there, with a
word."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.spec.shipped import recipes_directory

KEYS = (
    "model.path",
    "data.path",
    "data.validation_path",
    "data.tokenizer.path",
    "data.chat_template",
    "lora.path",
)
"""Keys whose values may be paths."""


def relative(recipe: Path, run: Any) -> bool:
    """Return whether paths in ``recipe`` are relative to its file, and not to the shell's directory: not where both are
    the same, nor in recipes that ship with the package, nor in a run's own, which names the run as its directory is
    named and has the paths of its start."""
    home = recipe.parent.resolve()
    return home not in (Path.cwd(), recipes_directory().resolve()) and home.name != run


def placed(key: str, value: Any, recipe: Path) -> tuple[Any, list[str]]:
    """The value of a key of ``recipe`` as the shell's directory would have it, and words about paths that are not
    beside the recipe, or in both places."""
    if key not in KEYS:
        return value, []
    if isinstance(value, list):
        found = [placed(key, one, recipe) for one in value]
        return [one for one, _ in found], [word for _, words in found for word in words]
    if not isinstance(value, str) or "://" in value or os.path.isabs(os.path.expanduser(value)):
        return value, []
    return _placed(key, value, recipe)


def _placed(key: str, value: str, recipe: Path) -> tuple[str, list[str]]:
    beside = os.path.join(recipe.parent, value)
    if not _there(beside):
        here = [f"`{key}: {value}` is not beside {recipe}: it is read from the shell's directory"] * _there(value)
        return value, here
    return beside, [f"`{key}: {value}` is read beside {recipe}, not from the shell's directory"] * _there(value)


def _there(path: str) -> bool:
    """Return whether a file, a directory, or any that a pattern names, is there."""
    try:
        return os.path.exists(path) or any(_matches(path))
    except (ValueError, OSError):
        return False


def _matches(pattern: str) -> Iterator[str]:
    return glob.iglob(pattern) if glob.has_magic(pattern) else iter(())
