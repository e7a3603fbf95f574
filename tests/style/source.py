"""The package as text and as syntax trees, for the tests of style."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shardwise"
IGNORED = {".git", ".venv", "__pycache__", "runs", "build", "dist"}


@dataclass(frozen=True)
class Source:
    """One module of the package. ``name`` is dotted, ``path`` relative to the repository."""

    name: str
    path: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @cached_property
    def code_lines(self) -> int:
        """Lines that hold code: no blank line, no comment, no docstring."""
        words: set[int] = set()
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                words.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        lines = enumerate(map(str.strip, self.text.splitlines()), 1)
        return sum(bool(line) and not line.startswith("#") and number not in words for number, line in lines)

    def at(self, node: ast.AST | int, what: str) -> str:
        line = node if isinstance(node, int) else node.lineno  # type: ignore[attr-defined]
        return f"{self.path}:{line}: {what}"


@cache
def sources() -> tuple[Source, ...]:
    """Every module of the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        found.append(Source(name, str(path.relative_to(ROOT)), text, ast.parse(text)))
    return tuple(found)


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method, nested ones too."""
    return (node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@dataclass(frozen=True)
class Import:
    """One imported module or name, absolute. ``inside`` a function; ``typing_only`` under TYPE_CHECKING."""

    module: str
    name: str | None
    line: int
    inside: bool
    typing_only: bool


@cache
def imports(source: Source) -> tuple[Import, ...]:
    """Every import statement of a module, one entry a name."""
    found: list[Import] = []

    def visit(node: ast.AST, inside: bool, typing_only: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, None, node.lineno, inside, typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, source.at(node, "a relative import")
            module = node.module or ""
            found.extend(Import(module, alias.name, node.lineno, inside, typing_only) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                visit(child, inside, True)
            for child in node.orelse:
                visit(child, inside, typing_only)
        else:
            deeper = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                visit(child, deeper, typing_only)

    visit(source.tree, False, False)
    return tuple(found)


def target(imported: Import, names: set[str]) -> str | None:
    """The module of the package that an import loads; None when it is not one of ours."""
    if imported.name is not None and f"{imported.module}.{imported.name}" in names:
        return f"{imported.module}.{imported.name}"
    return imported.module if imported.module in names else None


@cache
def tree_files() -> tuple[Path, ...]:
    """Every file of the repository that is, or would be, tracked."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        names = (ROOT / name for name in listed.stdout.split("\0") if name)
    else:
        names = (path for path in ROOT.rglob("*") if not IGNORED.intersection(path.parts))
    return tuple(sorted(path for path in names if path.is_file()))


def report(offenders: list[str], rule: str) -> None:
    """Fail with every offender on a line of its own."""
    assert not offenders, "\n".join([rule, *offenders])
