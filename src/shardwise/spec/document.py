"""A YAML 1.2 document read into plain data, with the line of every entry, and nothing executed.

Stock loaders are too generous for a file that decides what a cluster does: YAML 1.1 reads ``1e-3`` as text and ``no``
as false, the last of two equal keys wins, tags build objects, and aliases can expand without bound. Here scalars
follow the YAML 1.2 core schema, duplicate keys are reported, tags and interpolation are refused, and size, depth and
expansion have limits. Only the event parser is taken from ruamel.yaml.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML, events
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from shardwise.errors import ConfigError, MissingInputError, PolicyError, Problem, first_line
from shardwise.spec.files import open_regular

KeyPath = tuple[str | int, ...]
MAX_BYTES = 2**18
MAX_NODES = 1_000_000
MAX_DEPTH = 64
MAX_EVENTS = 8_000
"""Of a text: half a second's work, and several times as many as any configuration has."""
NESTED = re.compile(r"(?:[\[{][^\[\]{}]*){" + str(MAX_DEPTH + 1) + "}")
"""So many brackets that none closes: the scanner's time would grow with the square of their number."""

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
    interpolated: bool = False

    def place(self, path: KeyPath) -> str:
        """``file:line`` of the entry, or of the nearest entry above it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f"{self.name}:{self.lines[path[:length]]}"
        return self.name


def resolve(text: str) -> Any:
    """A plain scalar by the YAML 1.2 core schema: ``1e-3`` is a number, ``no`` and ``1:30`` are text, ``010`` is 10."""
    for pattern, convert in _CORE:
        if pattern.fullmatch(text):
            return convert(text)
    return text


def read(path: Path) -> Document:
    """Read a file. Raises MissingInputError (CFG011), ConfigError (CFG007) or PolicyError (SEC001 to SEC003)."""
    return parse(read_text(path), str(path))


def read_text(path: Path) -> str:
    """The text of a small file. Raises as :func:`read`."""
    try:
        with open_regular(path) as stream:
            content = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        beside = path.parent if os.path.isdir(path.parent) else Path(os.devnull)
        there = [*beside.glob("[!.]*.y*ml"), *(recipe.parent for recipe in beside.glob("[!.]*/recipe.yaml"))]
        near = ", ".join(sorted(map(str, there))[:5])
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error.args[-1])
        fix = f"there are: {near}" if near else "check the path"
        raise MissingInputError(Problem("CFG011", f"cannot read {path}: {reason}", fix=fix)) from None
    if len(content) > MAX_BYTES:
        _too_large(str(path), f"is larger than {MAX_BYTES:,} bytes (limit)")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"{path} is not UTF-8: byte {content[error.start]:#04x} at {error.start}"
        raise ConfigError(Problem("CFG007", what, fix="save it as UTF-8")) from None


def parse(text: str, name: str, *, interpolated: bool = False) -> Document:
    """The one document of ``text``. ``name`` is used in messages; ``interpolated``: ``${...}`` is text, not refused."""
    document = Document(name, interpolated=interpolated)
    if deep := NESTED.search(text):
        line = text.count("\n", 0, deep.start()) + 1
        _too_large(f"{name}:{line}", f"is nested more than {MAX_DEPTH} deep (limit)")
    try:
        _Composer(text, document).compose()
    except MarkedYAMLError as error:
        raise ConfigError(_invalid(error, text, name)) from None
    except (YAMLError, ValueError) as error:
        raise ConfigError(Problem("CFG007", f"{name} is not valid YAML: {first_line(error)}", where=name)) from None
    return document


class _Composer:
    """Builds values from the events of one document. ``anchors``: each with the nodes it expands to."""

    def __init__(self, text: str, document: Document) -> None:
        self.events = _untagged(YAML(typ="safe", pure=True).parse(text), document.name)
        self.document = document
        self.anchors: dict[str, tuple[Any, int]] = {}
        self.nodes = 0

    def compose(self) -> None:
        started = False
        for event in self.events:
            if isinstance(event, events.DocumentStartEvent):
                if started:
                    raise ValueError(f"a second document starts at line {_line(event)}; one file holds one document")
                started = True
            elif isinstance(event, events.NodeEvent):
                self.document.data = self._value(event, ())

    def _value(self, event: Any, path: KeyPath) -> Any:
        """Return the value that begins with ``event``, at ``path``."""
        name = self.document.name
        line = _line(event)
        before = self.nodes
        aliased = isinstance(event, events.AliasEvent)
        if aliased and event.anchor not in self.anchors:
            raise ValueError(f"line {line}: alias *{event.anchor} refers to nothing before it")
        value, size = self.anchors[event.anchor] if aliased else (None, 1)
        self.nodes += size
        if self.nodes > MAX_NODES:
            _too_large(name, f"expands to more than {MAX_NODES:,} nodes (limit)")
        if aliased:
            return value
        if isinstance(event, events.ScalarEvent):
            value = _scalar(event, self.document, line)
        elif len(path) >= MAX_DEPTH:
            _too_large(f"{name}:{line}", f"is nested more than {MAX_DEPTH} deep (limit)")
        else:
            value = self._mapping(path) if isinstance(event, events.MappingStartEvent) else self._list(path)
        if event.anchor:
            self.anchors[event.anchor] = value, self.nodes - before
        return value

    def _list(self, path: KeyPath) -> list[Any]:
        found: list[Any] = []
        while not isinstance(event := next(self.events), events.CollectionEndEvent):
            here = (*path, len(found))
            self.document.lines[here] = _line(event)
            found.append(self._value(event, here))
        return found

    def _mapping(self, path: KeyPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not isinstance(event := next(self.events), events.CollectionEndEvent):
            key = None if isinstance(event, events.CollectionStartEvent) else self._value(event, path)
            key = event.value if isinstance(event, events.ScalarEvent) else key
            if not isinstance(key, str):
                raise ValueError(f"line {_line(event)}: a key must be text, not a collection")
            here = (*path, key)
            if key in found:
                dotted = ".".join(str(part) for part in here)
                places = f"{self.document.name}:{self.document.lines[here]} and :{_line(event)}"
                self.document.problems.append(Problem("CFG003", f"`{dotted}` is set twice", places, "remove one"))
            self.document.lines[here] = _line(event)
            found[key] = self._value(next(self.events), here)
        return found


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _scalar(event: events.ScalarEvent, document: Document, line: int) -> Any:
    if not document.interpolated:
        refuse_interpolation(event.value, f"{document.name}:{line}")
    if any("\ud800" <= character <= "\udfff" for character in event.value):
        raise ValueError(f"line {line}: half of a surrogate pair is not a character")
    return resolve(event.value) if event.style in (None, "") else event.value


def refuse_interpolation(text: str, where: str) -> None:
    """``${...}`` would make a recipe mean something else on another machine, and can read secrets."""
    if "${" in text:
        found = text[text.index("${") :][:60]
        what = f"interpolation {found!r} is refused"
        raise PolicyError(Problem("SEC003", what, where, "write the value, or pass key=value"))


def _untagged(found: Iterable[Any], name: str) -> Iterator[Any]:
    """The events, up to one with a tag, which is refused."""
    for place, event in enumerate(found):
        if place > MAX_EVENTS:
            _too_large(name, f"has more than {MAX_EVENTS:,} values (limit)")
        tagged = isinstance(event, events.ScalarEvent | events.CollectionStartEvent)
        if tagged and str(event.tag) not in ("", "None"):
            _refuse_tag(str(event.tag), f"{name}:{_line(event)}")
        yield event


def _refuse_tag(tag: str, where: str) -> None:
    shown = tag.replace("tag:yaml.org,2002:", "!!")
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
