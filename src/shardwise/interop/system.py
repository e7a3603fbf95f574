"""A system, as the importer knows it: how its files are recognised, what its keys mean, and what they say together.

A key ends in one of four ways, which a row of the system's table (``tables/NAME.csv``) or its :attr:`System.settle`
decides:

    kept      the same meaning here
    plan      how something is done, which is the plan's to choose here
    none      no effect on training: logging, launching, publishing
    refused   it changes the mathematics in a way that is not there; ``say`` is what it would have done

``read`` in a table: kept, by ``settle``, which looks at several keys together. A key in no table is unread, which stops
the import where it might be mathematical (:data:`MATHEMATICAL`).
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, cached_property
from importlib import resources
from typing import Any

from shardwise.spec.document import resolve
from shardwise.spec.keys import near

FATES = ("kept", "plan", "none", "refused")
READ = ("kept", "read")
OFF = ("false", "no", "none", "null", "0", "0.0", "", "[]", "{}", "disabled", "-1")
"""Values that ask for nothing."""
MATHEMATICAL = re.compile(
    r"(^|[._-])(lr|learning|optim\w*|sched\w*|loss\w*|beta\d?|eps|decay|momentum|clip\w*|grad\w*|mix\w*|weight\w*"
    r"|dropout|noise|quant\w*|fp8\w*|reward\w*|kl|aux|prun\w*|distill\w*|label_smoothing)([._-]|$)"
)
"""Names of keys that may change what is computed."""


@dataclass(frozen=True)
class Meaning:
    """The meaning of a key: its ``fate``, and of one that is kept the key of ``ours``. ``values``: theirs and ours;
    empty: unchanged, and an empty one of ours leaves the setting out. ``say``: what a refused one would have done."""

    fate: str
    ours: str = ""
    values: dict[str, str] = field(default_factory=dict)
    say: str = ""

    def value(self, value: Any) -> Any:
        """Return our value for theirs; KeyError where the row knows values, and not this one."""
        if not self.values:
            return value
        name = word(value)
        if name not in self.values and "*" in self.values:
            return value
        return resolve(self.values[name])

    def harmless(self, value: Any) -> bool:
        """Return whether a value of a key that is refused asks for nothing."""
        if value is None:
            return True
        names = self.values or dict.fromkeys(OFF)
        found = number(value)
        return word(value) in names or (found is not None and found in map(number, names))


Table = tuple[dict[str, Meaning], tuple[tuple[str, Meaning], ...]]
"""Rows: those of whole keys, and those of globs, in order."""


@dataclass(frozen=True)
class Said:
    """A key of theirs: what it says, and where."""

    key: str
    value: Any
    where: str


@dataclass(frozen=True)
class Taken:
    """A setting of ours, and where it came from: a place and their words, or a default of the system's."""

    value: Any
    origin: str


@dataclass
class Import:
    """A file of an import: its keys by name, and what all files of it have said so far. ``world``: processes;
    ``decided``: what a file beside it decides (``zero``, ``optimizer``, ``schedule``); ``unknown``: keys whose values
    are variables that it does not set."""

    entries: dict[str, Said]
    world: int
    settings: dict[str, Taken] = field(default_factory=dict)
    fates: dict[str, list[str]] = field(default_factory=lambda: {fate: [] for fate in (*FATES, "unread")})
    refusals: list[tuple[Said, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    asked: dict[str, str] = field(default_factory=dict)
    decided: set[str] = field(default_factory=set)
    unknown: list[tuple[Said, str]] = field(default_factory=list)
    misspelt: list[tuple[Said, str]] = field(default_factory=list)

    def get(self, *keys: str, default: Any = None) -> Any:
        """The value of the first of ``keys`` that is there and not ``auto`` or empty."""
        entry = self.entry(*keys)
        return default if entry is None else entry.value

    def entry(self, *keys: str) -> Said | None:
        """Return what :meth:`get` does, with its place."""
        found = (self.entries[key] for key in keys if key in self.entries)
        return next((entry for entry in found if entry.value not in (None, "auto", "")), None)

    def number(self, *keys: str, default: float | None = None) -> float | None:
        """A number; text that is none is refused."""
        entry = self.entry(*keys)
        if entry is None:
            return default
        value = number(entry.value)
        if value is None:
            self.refuse(entry, f"`{show(entry.value)}` is no number")
            return default
        return value

    def count(self, *keys: str, default: int | None = None) -> int | None:
        """A whole number."""
        value = self.number(*keys, default=default)
        return None if value is None else int(value)

    def pair(self, key: str) -> tuple[float, float] | None:
        """Return the two numbers of a key, as of betas; anything else is refused."""
        entry = self.entry(key)
        if entry is None:
            return None
        found = [number(value) for value in entry.value] if isinstance(entry.value, list) else []
        if len(found) == 2 and found[0] is not None and found[1] is not None:
            return found[0], found[1]
        self.refuse(entry, f"`{show(entry.value)}` is no pair of numbers")
        return None

    def on(self, key: str) -> bool:
        """Return whether a switch is on."""
        return key in self.entries and word(self.entries[key].value) not in OFF

    def set(self, ours: str, value: Any, *keys: str, of: str = "") -> None:
        """Record a setting of ours that ``keys`` say, or that is a default ``of`` the system's."""
        said = [self.entries[key] for key in keys if key in self.entries]
        origin = "; ".join(f"{entry.where} {entry.key}: {show(entry.value)}" for entry in said) or f"default of {of}"
        if value is not None:
            self.settings[ours] = Taken(value, origin)

    def clear(self, ours: str, *keys: str, of: str = "") -> None:
        """Record that a setting of ours is null: what it does is turned off there."""
        self.set(ours, OFF, *keys, of=of)
        self.settings[ours] = Taken(None, self.settings[ours].origin)

    def refuse(self, entry: Said, say: str) -> None:
        """Record that a key asks for what is not there."""
        self.refusals.append((entry, say))

    def take(self, rows: str, of: str = "") -> None:
        """Record the settings of ``tables/settings.csv`` of this name, each of which keys say by themselves. A row
        ``reads`` a ``number``, a ``count``, one of at least 1 (``some``) or 2 (``degree``), a ``switch``, its default
        where one is ``on``, ``text``, or words as ``theirs=ours``; one that is ``refused`` where it is on, with the
        reason in the place of a default. ``of``: whose the defaults are without a title."""
        lines = [row for row in lines_of("settings") if row["of"] == rows]
        assert lines, f"no settings of {rows}"
        for row in lines:
            keys = row["keys"].split()
            if row["reads"] == "refused":
                for key in filter(self.on, keys):
                    self.refuse(self.entries[key], row["default"])
            else:
                value = self._read(row["reads"], keys, resolve(row["default"]) if row["default"] else None)
                for ours in row["ours"].split():
                    self.set(ours, value, *keys, of=row["title"] or of)

    def _read(self, how: str, keys: list[str], default: Any) -> Any:
        if how in ("switch", "on"):
            on = any(map(self.on, keys))
            return on if how == "switch" else default if on else None
        if "=" in how:
            return pairs(how).get(word(self.get(*keys, default=default)))
        if how == "text":
            return self.get(*keys)
        if how == "number":
            return self.number(*keys, default=default)
        least = {"count": -math.inf, "some": 1, "degree": 2}[how]
        count = self.count(*keys, default=default)
        return None if count is None or count < least else count

    def ask(self, ours: str, why: str) -> None:
        """Record that the files do not say a setting, which somebody else must."""
        if ours not in self.settings:
            self.asked[ours] = why


@dataclass(frozen=True)
class System:
    """A system whose files are read. ``marks``: keys (or globs of them) that its files have and others do not, and how
    much each counts; ``tables``: of its keys, the first that knows a key decides; ``sections``: beginnings of keys
    without which a table may know them; ``switches``: sections that have no effect unless their ``enabled`` is on.
    ``keys``: what no table says, of whole keys or globs; all that another package's has (docs/extending.md)."""

    name: str
    title: str
    marks: dict[str, int]
    tables: tuple[str, ...]
    settle: Callable[[Import], None]
    sections: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    keys: Mapping[str, Meaning] = field(default_factory=dict)

    def likeness(self, keys: set[str]) -> int:
        """Return how much these keys look like one of its files."""
        return sum(weight for mark, weight in self.marks.items() if any(fnmatchcase(key, mark) for key in keys))

    def row(self, key: str) -> Meaning | None:
        """Return what the tables say of a key."""
        names = self._names(key)
        return next((row for rows in self._tables for name in names if (row := _find(rows, name))), None)

    @cached_property
    def _tables(self) -> list[Table]:
        return [_sorted(self.keys.items()), *map(table, self.tables)]

    def _names(self, key: str) -> list[str]:
        return [key, *(key.removeprefix(part) for part in self.sections if key.startswith(part))]

    def loosely(self, key: str) -> bool:
        """Return whether tables know a key by a glob alone, which knows what is misspelt too."""
        return not any(name in whole for whole, _ in self._tables for name in self._names(key))

    def misspelt(self, key: str) -> str | None:
        """Return the key that is read which an unknown one misspells."""
        names = [name for whole, _ in self._tables for name, row in whole.items() if row.fate in READ]
        names += [f"fsdp_config.{name}" for name, row in table("fsdp")[0].items() if row.fate in READ]
        return None if key in names else near(key, names)


@cache
def table(name: str) -> Table:
    """The rows of a table."""
    rows = list[tuple[str, Meaning]]()
    for line in lines_of(name):
        row = Meaning(line["fate"], line["ours"], pairs(line["values"]), line["say"])
        rows += [(key, row) for key in line["keys"].split()]
    return _sorted(rows)


def _sorted(rows: Iterable[tuple[str, Meaning]]) -> Table:
    pairs = [*rows]
    globs = tuple(pair for pair in pairs if "*" in pair[0])
    return {key: row for key, row in pairs if "*" not in key}, globs


@cache
def hub_names(system: str) -> dict[str, str]:
    """The models of the Hub by the names that a system has for them."""
    return {line["name"]: line["hub"] for line in lines_of("models") if line["system"] == system}


@cache
def marks(system: str) -> dict[str, int]:
    """By what keys a system's files are recognised (``tables/marks.csv``)."""
    lines = [line for line in lines_of("marks") if line["system"] == system]
    return {key: int(line["weight"]) for line in lines for key in line["keys"].split()}


@cache
def words(of: str) -> dict[str, str]:
    """Our words for theirs (``tables/words.csv``)."""
    lines = [line for line in lines_of("words") if line["of"] == of]
    return {word: line["ours"] for line in lines for word in line["theirs"].split()}


@cache
def lines_of(name: str) -> tuple[dict[str, str], ...]:
    """The lines of a table by the names of its columns."""
    text = resources.files("shardwise.interop").joinpath("tables", f"{name}.csv").read_text("utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def pairs(text: str) -> dict[str, str]:
    """``a=b c=`` as a mapping."""
    return dict(pair.split("=", 1) for pair in text.split())


def _find(rows: Table, key: str) -> Meaning | None:
    whole, globs = rows
    return whole.get(key) or next((row for glob, row in globs if fnmatchcase(key, glob)), None)


def word(value: Any) -> str:
    """A value in lower case, as it would be written."""
    return "null" if value is None else str(value).strip().lower()


def show(value: Any) -> str:
    """A value, short."""
    text = word(value) if isinstance(value, bool) or value is None else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def number(value: Any) -> float | None:
    """A number as these files write them: ``5e8``, ``1_000``, ``"1e-5"``; None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        found = float(str(value).replace("_", ""))
    except ValueError:
        return None
    return found if math.isfinite(found) else None
