"""docs/reliability.md: the tests that it names are there, and so are its codes of errors and its exit codes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from shardwise.cli import interrupt
from shardwise.errors import ShardwiseError
from tests.style.test_codes import told_codes

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
ROWS = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
FAILURES = [row for row in ROWS if len(row) == 3 and row[1] != "what happens" and not re.match(r"\| (exit|\d)", row[0])]
SIGNALLED = "128 + n"


def missing(node: str) -> bool:
    """Whether there is no such test: ``file`` or ``file::function``."""
    name, _, function = node.partition("::")
    if not (ROOT / name).is_file():
        return True
    found = ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8")))
    return bool(function) and function not in {one.name for one in found if isinstance(one, ast.FunctionDef)}


def test_every_test_that_it_names_is_there() -> None:
    nodes = re.findall(r"tests/[\w/]+\.py(?:::\w+)?", PAGE)
    assert len(nodes) > 100 and [node for node in nodes if missing(node)] == []


def test_every_failure_has_a_test_or_says_that_it_has_none() -> None:
    assert len(FAILURES) >= 72
    untested = [row for row in FAILURES if "tests/" not in row[2]]
    assert [row[0] for row in untested if row[2] != "- |"] == []
    assert [row[0] for row in untested if not re.search(r"\*\*[Nn]ot|no test|has a test", row[1])] == []


def test_every_code_is_explained() -> None:
    codes = set(re.findall(r"\b[A-Z]{2,5}\d{3}\b", PAGE))
    assert len(codes) > 30 and codes - told_codes() == set()


def test_exit_codes_are_those_of_the_source() -> None:
    kinds = {ShardwiseError.exit_code, *(kind.exit_code for kind in ShardwiseError.__subclasses__())}
    known = {0, interrupt.EXIT_CODE} | kinds
    table = [row[0].removeprefix("| ") for row in ROWS if re.match(r"\| \d", row[0])]
    assert {int(cell) for cell in table if cell != SIGNALLED} == known and SIGNALLED in table
    assert {int(number) for number in re.findall(r"\bexit (?:code )?(\d+)", PAGE)} <= known
