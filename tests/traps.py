"""Modules that must not be loaded, in a directory that a command stands in."""

from __future__ import annotations

from pathlib import Path

NAMES = ("ctypes", "jinja2", "json", "numpy", "selectors", "shutil", "socket", "threading", "torch", "typer", "xxhash")


def set_traps(directory: Path) -> Path:
    """``directory`` with a module of each of ``NAMES`` that leaves a mark when it is loaded."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        mark = directory / f"{name}-was-loaded"
        (directory / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    return directory


def sprung(directory: Path) -> list[str]:
    """The marks that were left."""
    return sorted(path.name for path in directory.glob("*-was-loaded"))
