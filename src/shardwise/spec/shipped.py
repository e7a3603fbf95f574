"""The files that ship with the package beside its code: recipes, and conversations to tune on."""

from __future__ import annotations

from pathlib import Path


def recipes_directory() -> Path:
    """Recipes that ship with the package; in a source tree, those of the repository."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"
