"""Names say what a thing is; the tree says nothing about a machine; the recipe's keys change only on purpose."""

from __future__ import annotations

import ast
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from shardwise.spec.recipe import Recipe
from tests.style.source import PACKAGE, ROOT, Source, report, sources, tree_files

EMPTY_WORDS = {"manager", "helper", "utils", "util", "engine", "handler", "context", "wrapper", "base", "misc"}
"""Words that fit every name and therefore tell nothing."""

GIVEN = {"setup_context"}
"""Names that torch looks for."""

MACHINE_PATH = re.compile(r"(?<![\w.$}~:<*/-])/(home|root|work|Users|farm|opt)/[\w.]")
"""An absolute path below a directory that only one machine or person has."""

KEYS = Path(__file__).with_name("recipe_keys.txt")


def words(name: str) -> set[str]:
    """The words of a name in snake or camel case, in lower case, plural or not."""
    parts = [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    return {*parts, *(part.removesuffix("s") for part in parts)}


def defined(source: Source) -> Iterator[tuple[int, str]]:
    """Every name that a module gives: its own, and those of classes, functions, parameters and variables."""
    yield 1, source.name.rpartition(".")[2]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def test_names_do_not_use_empty_words() -> None:
    found = [
        source.at(line, name)
        for source in sources()
        for line, name in defined(source)
        if words(name) & EMPTY_WORDS and name not in GIVEN
    ]
    report(found, f"not in names: {', '.join(sorted(EMPTY_WORDS))}")


def test_no_path_of_a_machine() -> None:
    found = []
    for path in tree_files():
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        name = path.relative_to(ROOT)
        found += [
            f"{name}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if MACHINE_PATH.search(line)
        ]
    report(found, "no absolute path of a machine")


@pytest.mark.parametrize(
    ("text", "hit"),
    [
        ("see /ro" + "ot/x", True),
        ("'/ho" + "me/ann/data'", True),
        ("https://example.org/ho" + "me/ann", False),
        ("src/wo" + "rk/x.py", False),
    ],
)
def test_the_pattern_of_machine_paths(text: str, hit: bool) -> None:
    assert bool(MACHINE_PATH.search(text)) is hit


TOLD_PATH = re.compile(r"(?<![\w./-])(?:src/shardwise|tests|bench|recipes)/[\w./-]*\w")


def test_paths_that_pages_tell_are_there() -> None:
    """In the log are those of its day."""
    pages = [path for path in tree_files() if path.suffix == ".md" and path.name not in ("log.md", "CHANGELOG.md")]
    wrong = [
        f"{page.relative_to(ROOT)}: {told}"
        for page in pages
        if "decisions" not in page.parts
        for told in TOLD_PATH.findall(page.read_text())
        if not (ROOT / told).exists()
    ]
    report(wrong, "a page tells of files that there are")


def test_the_map_of_the_planner_has_every_file() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    told = text.partition("### A plan, from a recipe to seconds")[2].partition("\n#")[0]
    names = {path.stem for path in (PACKAGE / "planner").glob("*.py")} - {"__init__"}
    assert not names - set(re.findall(r"`(\w+)\.", told))
    assert not set(re.findall(r"`(\w+)\.py`", told)) - names


def test_no_large_file_is_tracked() -> None:
    large = [f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes" for path in tree_files()]
    report([line for line, path in zip(large, tree_files(), strict=True) if path.stat().st_size > 1e6], "at most 1 MB")


def test_recipe_keys_are_frozen() -> None:
    """A new key is a promise: write it into recipe_keys.txt, the docs and the changelog."""
    frozen = KEYS.read_text().split()
    assert sorted(keys(Recipe)) == frozen, f"recipe keys differ from {KEYS.relative_to(ROOT)}"


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of every key, those of list entries included."""
    for name, field in section.model_fields.items():
        inner = [kind for kind in flat(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if inner:
            for kind in inner:
                yield from keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def flat(annotation: object) -> Iterator[object]:
    """The types inside an annotation such as ``list[Group] | None``."""
    if isinstance(annotation, types.UnionType | types.GenericAlias) or typing.get_origin(annotation) is not None:
        for argument in typing.get_args(annotation):
            yield from flat(argument)
    else:
        yield annotation


ALIKE = {
    "bounds": "lower bounds, of a step and of what strategies add",
    "export": "a command, and what it runs",
    "generate": "a command, and what it runs",
    "launchers": "their rows, and what they start",
    "length": "of a run: found, and in words",
    "paper": "what a technique does between units",
    "plan": "a plan, and the command that makes one",
    "rounding": "of low dtypes: a proof of it, and an optimizer with it",
    "sizes": "those of a technique",
    "slurm": "a job of that scheduler, and a run inside one",
}
"""Modules whose name stands twice, and what it means each time."""


def test_a_module_s_name_means_one_thing() -> None:
    names = [path.stem for path in PACKAGE.rglob("*.py") if path.stem not in ("__init__", "__main__")]
    assert {name for name in names if names.count(name) > 1} == set(ALIKE)
