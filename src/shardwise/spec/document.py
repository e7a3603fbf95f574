"""A YAML 1.2 document read into plain data, with the line of every entry, and nothing executed.

Stock loaders are too generous for a file that decides what a cluster does: YAML 1.1 reads ``1e-3`` as text and ``no``
as false, the last of two equal keys wins, tags build objects, and aliases can expand without bound. Here scalars
follow the YAML 1.2 core schema, duplicate keys are reported, tags and interpolation are refused, and size, depth and
expansion have limits. Only the event parser is taken from ruamel.yaml.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML, events
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from shardwise.errors import ConfigError, MissingInputError, PolicyError, Problem

KeyPath = tuple[str | int, ...]
MAX_BYTES = 2**18
MAX_NODES = 1_000_000
MAX_DEPTH = 64

_CORE: tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...] = (
    (re.compile(r"(?:|~|null|Null|NULL)"), lambda text: None),
    (re.compile(r"(?:true|True|TRUE|false|False|FALSE)"), lambda text: text.lower() == "true"),
    (re.compile(r"[-+]?[0-9]+"), lambda text: int(text, 10) if len(text) < 400 else text),
    (re.compile(r"0o[0-7]+"), lambda text: int(text[2:], 8)),
    (re.compile(r"0x[0-9a-fA-F]+"), lambda text: int(text[2:], 16)),
    (re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(?:inf|Inf|INF)"), lambda text: float(text.replace(".", "").lower())),
    (re.compile(r"\.(?:nan|NaN|NAN)"), lambda text: float("nan")),
)


@dataclass
class Document:
    """Plain data and, for every entry, the place it was written at. ``problems`` holds duplicate keys."""

    name: str
    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: KeyPath) -> str:
        """``file:line`` of the entry, or of the nearest entry above it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f"{self.name}:{self.lines[path[:length]]}"
        return self.name


@dataclass
class _Open:
    """A collection whose end has not been seen yet."""

    value: dict[str, Any] | list[Any]
    path: KeyPath
    anchor: str | None
    first_node: int
    key: str | None = None
    key_line: int = 0


def resolve(text: str) -> Any:
    """A plain scalar by the YAML 1.2 core schema: ``1e-3`` is a number, ``no`` and ``1:30`` are text, ``010`` is 10."""
    for pattern, convert in _CORE:
        if pattern.fullmatch(text):
            return convert(text)
    return text


def read(path: Path) -> Document:
    """Read a file. Raises MissingInputError (CFG011), ConfigError (CFG007) or PolicyError (SEC001 to SEC003)."""
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except IsADirectoryError:
        what = f"{path} is a directory, not a file"
        raise MissingInputError(Problem("CFG011", what, fix="name the YAML file")) from None
    except (OSError, ValueError) as error:
        near = ", ".join(sorted(str(p) for p in path.parent.glob("*.yaml"))[:5]) if os.path.isdir(path.parent) else ""
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        fix = f"there are: {near}" if near else "check the path"
        raise MissingInputError(Problem("CFG011", f"cannot read {path}: {reason}", fix=fix)) from None
    if len(content) > MAX_BYTES:
        _too_large(str(path), f"is larger than {MAX_BYTES:,} bytes (limit)")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"{path} is not UTF-8: byte {content[error.start]:#04x} at {error.start}"
        raise ConfigError(Problem("CFG007", what, fix="save it as UTF-8")) from None
    return parse(text, str(path))


def parse(text: str, name: str) -> Document:
    """The one document of ``text``. ``name`` is used in messages."""
    document = Document(name)
    try:
        _compose(text, document)
    except MarkedYAMLError as error:
        raise ConfigError(_invalid(error, text, name)) from None
    except (YAMLError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(Problem("CFG007", f"{name} is not valid YAML: {first}", where=name)) from None
    return document


def _compose(text: str, document: Document) -> None:
    stack: list[_Open] = []
    anchors: dict[str, tuple[Any, int]] = {}
    nodes = documents = 0
    for event in YAML(typ="safe", pure=True).parse(text):
        line = event.start_mark.line + 1
        if isinstance(event, events.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise ValueError(f"a second document starts at line {line}; one file holds one document")
        elif isinstance(event, (events.MappingStartEvent, events.SequenceStartEvent)):
            _refuse_tag(event.tag, document.name, line)
            if stack and isinstance(stack[-1].value, dict) and stack[-1].key is None:
                raise ValueError(f"line {line}: a key must be text, not a collection")
            if len(stack) >= MAX_DEPTH:
                _too_large(f"{document.name}:{line}", f"is nested more than {MAX_DEPTH} deep (limit)")
            nodes += 1
            value: dict[str, Any] | list[Any] = {} if isinstance(event, events.MappingStartEvent) else []
            path = (*stack[-1].path, _place_in(stack[-1])) if stack else ()
            stack.append(_Open(value, path, event.anchor, nodes))
        elif isinstance(event, events.CollectionEndEvent):
            done = stack.pop()
            if done.anchor:
                anchors[done.anchor] = (done.value, nodes - done.first_node + 1)
            _put(stack, document, done.value, line, is_key=False)
        elif isinstance(event, events.ScalarEvent):
            nodes += 1
            scalar = _scalar(event, document.name, line)
            if event.anchor:
                anchors[event.anchor] = (scalar, 1)
            _put(stack, document, scalar, line, is_key=True, text=event.value)
        elif isinstance(event, events.AliasEvent):
            if event.anchor not in anchors:
                raise ValueError(f"line {line}: alias *{event.anchor} refers to nothing before it")
            aliased, size = anchors[event.anchor]
            nodes += size
            _put(stack, document, aliased, line, is_key=isinstance(aliased, str), text=str(aliased))
        if nodes > MAX_NODES:
            _too_large(document.name, f"expands to more than {MAX_NODES:,} nodes (limit)")


def _place_in(parent: _Open) -> str | int:
    return len(parent.value) if isinstance(parent.value, list) else parent.key or ""


def _put(stack: list[_Open], document: Document, value: Any, line: int, *, is_key: bool, text: str = "") -> None:
    """Place a finished value into the open collection: as an item, as a key, or as the value of the waiting key."""
    if not stack:
        document.data = value
        return
    parent = stack[-1]
    if isinstance(parent.value, list):
        document.lines[(*parent.path, len(parent.value))] = line
        parent.value.append(value)
    elif parent.key is None:
        if not is_key:
            raise ValueError(f"line {line}: a key must be text, not a collection")
        parent.key, parent.key_line = text, line
    else:
        path = (*parent.path, parent.key)
        if parent.key in parent.value:
            dotted = ".".join(str(part) for part in path)
            places = f"{document.name}:{document.lines[path]} and :{parent.key_line}"
            document.problems.append(Problem("CFG003", f"`{dotted}` is set twice", places, "remove one"))
        document.lines[path] = parent.key_line
        parent.value[parent.key] = value
        parent.key = None


def _scalar(event: events.ScalarEvent, name: str, line: int) -> Any:
    _refuse_tag(event.tag, name, line)
    refuse_interpolation(event.value, f"{name}:{line}")
    if any("\ud800" <= character <= "\udfff" for character in event.value):
        raise ValueError(f"line {line}: half of a surrogate pair is not a character")
    return resolve(event.value) if event.style in (None, "") else event.value


def refuse_interpolation(text: str, where: str) -> None:
    """``${...}`` would make a recipe mean something else on another machine, and can read secrets."""
    if "${" in text:
        found = text[text.index("${") :][:60]
        what = f"interpolation {found!r} is refused"
        raise PolicyError(Problem("SEC003", what, where, "write the value, or pass key=value"))


def _refuse_tag(tag: Any, name: str, line: int) -> None:
    if tag is None or str(tag) in ("", "None"):
        return
    shown = str(tag).replace("tag:yaml.org,2002:", "!!")
    where = f"{name}:{line}"
    if "include" in shown:
        raise PolicyError(Problem("SEC003", f"`{shown}`: includes are refused", where, "write the text into this file"))
    kind = "a Python object tag" if "python" in shown else "a tag"
    raise PolicyError(Problem("SEC001", f"{kind}, `{shown}`; refused, nothing was executed", where, "remove the tag"))


def _too_large(where: str, what: str) -> None:
    raise PolicyError(Problem("SEC002", f"{where} {what}", where, "write the values out, in one small file"))


def _invalid(error: MarkedYAMLError, text: str, name: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line, mark.column) if mark else (0, 0)
    lines = text.splitlines()
    indent = re.match(r"[ \t]*", lines[line]) if line < len(lines) else None
    if indent and "\t" in indent.group():
        reason, fix = "found a tab", "indent with spaces"
        column = indent.group().index("\t")
    else:
        reason = " ".join(part for part in (error.context, error.problem) if part) or "syntax error"
        fix = "check indentation, colons and quotes near there"
    where = f"{name}:{line + 1}:{column + 1}"
    return Problem("CFG007", f"{where} is not valid YAML: {reason}", where, fix)
