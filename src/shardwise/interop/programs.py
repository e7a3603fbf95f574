"""Configurations that are written in Python, as flat keys with places. Nothing is run: literal keywords of calls whose
name ends in ``Config`` are read, and what is not literal stays as a placeholder that asks for its value.

Understood are a function that returns such a call, names that were assigned one, another function of the file without
arguments, and assignments to attributes of what it returned (``config.training.steps = 5``).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import ConfigError, Problem
from shardwise.interop.scripts import whole_number
from shardwise.interop.system import Said

CHOICE, SUFFIX = "config", "Config"
"""The variable that says which of a file's functions is meant, and how the names of configurations end."""
DEEPEST, MOST_NAMES = 32, 300


@dataclass
class _Configuration:
    name: str
    functions: dict[str, ast.FunctionDef]
    given: Mapping[str, str]
    entries: dict[str, Said] = field(default_factory=dict)


def read_program(text: str, name: str, given: Mapping[str, str]) -> dict[str, Said]:
    """The keywords of the configuration that a function of ``text`` returns, by dotted name; the class or function that
    is called is ``_called_`` of its section, and its other arguments are ``_0_`` and so on. ``given``: values of what
    is not literal, and of several functions which (``config``). Raises ConfigError CFG007 for what is no Python or no
    configuration, IMP007 where the function is not told."""
    try:
        tree = ast.parse(text, name)  # of an error the interpreter reads the line again, in the file of this name
        functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
        program = _Configuration(name, functions, given)
        function = _chosen(program)
        _read(function, program, 0)
        program.entries[CHOICE] = Said(CHOICE, function.name, f"{name}:{function.lineno}")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        what = f"{name} cannot be read as Python: {type(error).__name__}"
        where = f"{name}:{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else name
        raise ConfigError(Problem("CFG007", what, where, "name a configuration file")) from None
    return program.entries


def _chosen(program: _Configuration) -> ast.FunctionDef:
    """The one function that is meant."""
    found = [each for each in program.functions.values() if _returns_config(each)]
    wanted = program.given.get(CHOICE)
    if not found:
        what = f"{program.name} has no function that returns a configuration"
        fix = "a function without arguments that returns `Trainer.Config(...)`, say"
        raise ConfigError(Problem("CFG007", what, program.name, fix))
    chosen = [each for each in found if wanted in (None, each.name)]
    if len(chosen) != 1:
        names = ", ".join(each.name for each in found)[:MOST_NAMES]
        what = f"has no configuration `{wanted}`; it has {names}" if wanted else f"has several configurations: {names}"
        raise ConfigError(Problem("IMP007", f"{program.name} {what}", program.name, f"`--set {CHOICE}=NAME`"))
    return chosen[0]


def _returns_config(function: ast.FunctionDef) -> bool:
    """Return whether a function takes nothing, and its annotation, or what it returns, is a configuration."""
    made = [node.value for node in function.body if isinstance(node, ast.Return)]
    called = any(isinstance(value, ast.Call) and _called(value).endswith(SUFFIX) for value in made)
    annotated = function.returns is not None and ast.unparse(function.returns).strip("'\"").endswith(SUFFIX)
    return not function.args.args and (called or annotated)


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _read(function: ast.FunctionDef, program: _Configuration, depth: int) -> None:
    """Take in what a function's statements say, in order."""
    body = _Body(program, depth)
    for statement in function.body:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            body.assign(statement.targets[0], statement.value)
        elif isinstance(statement, ast.Return) and statement.value is not None:
            if not (isinstance(statement.value, ast.Name) and statement.value.id == body.made):
                body.take(statement.value, (), depth)
        elif not isinstance(statement, ast.Expr | ast.Import | ast.ImportFrom | ast.Assert):
            body.leave_open(statement)


@dataclass
class _Body:
    """The names that statements of a function have given so far; ``made``: that of the configuration itself."""

    program: _Configuration
    depth: int
    known: dict[str, ast.expr] = field(default_factory=dict)
    made: str = ""

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        """Remember a name, or take in an attribute of the configuration."""
        if isinstance(target, ast.Name):
            self.known[target.id] = value
            if isinstance(value, ast.Call) and _called(value) in self.program.functions:
                self.made = target.id
                self.take(value, (), self.depth)
        elif path := _attribute(target):
            if path[0] != self.made and path[0] in self.known:
                self.made = path[0]
                self.take(self.known[path[0]], (), self.depth)
            if path[0] == self.made:
                self.take(value, path[1:], self.depth)

    def leave_open(self, statement: ast.stmt) -> None:
        """Leave open what a branch or a loop sets."""
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign | ast.AugAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    path = _attribute(target)
                    if path and path[0] == self.made:
                        self.say(key := ".".join(path[1:]), f"${{{key}}}", node)

    def take(self, node: ast.expr, path: tuple[str, ...], depth: int) -> None:
        """Take in a value: a call's keywords as a section, a literal as itself, anything else as a placeholder."""
        for _ in range(DEEPEST):
            if not (isinstance(node, ast.Name) and node.id in self.known):
                break
            node = self.known[node.id]
        key = ".".join(path)
        if depth > DEEPEST:
            raise RecursionError
        if isinstance(node, ast.Call) and not path and _called(node) in self.program.functions:
            return _read(self.program.functions[_called(node)], self.program, depth + 1)
        if isinstance(node, ast.List) and any(isinstance(item, ast.Call) for item in node.elts):
            node = ast.copy_location(ast.Call(ast.Name("list"), node.elts, []), node)
        for old in [old for old in self.program.entries if path and old.startswith(f"{key}.")]:
            del self.program.entries[old]
        if not isinstance(node, ast.Call):
            return self.say(key, _literal(node, key), node)
        called = _called(node)
        if path and not node.keywords and not called.endswith(SUFFIX):  # what it returns may be a value
            self.say(key, f"${{{key}}}", node)
        self.say(f"{key}._called_" if path else "_called_", called, node)
        for place, argument in enumerate(node.args):
            self.take(argument, (*path, f"_{place}_"), depth + 1)
        for keyword in node.keywords:
            self.take(keyword.value, (*path, keyword.arg or "_more_"), depth + 1)
        return None

    def say(self, key: str, value: Any, node: ast.expr | ast.stmt) -> None:
        """Record a key, or what was given for it."""
        where = f"{self.program.name}:{node.lineno}"
        self.program.entries[key] = Said(key, self.program.given.get(key, value), where)


def _attribute(node: ast.expr) -> tuple[str, ...]:
    """``config.training.steps`` as its names; empty for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) and names else ()


def _literal(node: ast.expr, key: str) -> Any:
    """A literal, or arithmetic of whole numbers; a placeholder named for the key else."""
    try:
        found = ast.literal_eval(node)
        return list(found) if isinstance(found, tuple) else found
    except (ValueError, TypeError, SyntaxError):
        found = whole_number(ast.unparse(node))
        return f"${{{key}}}" if found is None else found
