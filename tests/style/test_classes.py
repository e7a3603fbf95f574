"""A class name means one thing in the whole package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

COMMAND = "Options"
"""Each command's module calls its own so; cli/app.py finds them by that name."""
PACKAGE = Path(__file__).resolve().parents[2] / "src" / "shardwise"


def test_no_two_classes_have_one_name() -> None:
    """A leading underscore tells nobody two things apart."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert len(places) > 200
    assert not {name: found for name, found in places.items() if len(found) > 1 and name != COMMAND}
