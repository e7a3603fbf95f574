"""Reads the configuration files of other systems into a recipe: each key kept, left to the plan, without effect, or
refused, and nothing dropped without a word.

:func:`read_files` gives the settings that say what is learned, and as pins those that say how it is split: a plan
without the pins learns the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.errors import ConfigError, Problem, ShardwiseError
from shardwise.interop.flat_files import PROGRAMS, read_entries
from shardwise.interop.shared import end_within_warmup
from shardwise.interop.system import MATHEMATICAL, OFF, READ, Import, Said, System, Taken, show, word
from shardwise.interop.systems import SYSTEMS, named, recognise

PINS = ("parallel.", "offload.", "recompute.", "train.micro_batch_size", "train.gradient_accumulation_steps", "compile")
"""Keys of ours, and beginnings of them, that do not change what is learned."""
UNKNOWN = re.compile(r"\$\{(?:\w+:[^$]*\$\{)?([\w.]+)?[^}\s]*\}?|\$(\w+)?")
"""What a script, or a file with references, leaves to somebody else."""
NAMED = 4
"""More keys than these that are refused for one reason are counted."""
ASKED = {"model.path": "the model", "data.path": "the data"}
"""What every run needs, and files may leave out."""
FATES = {
    "kept": "read",
    "plan": "left to the plan",
    "none": "without effect on training",
    "unread": "not known, and not read",
}


@dataclass(frozen=True)
class Imported:
    """The files of other systems, read. ``settings`` and ``pins``: by key of ours; ``fates``: which of their keys ended
    how; ``asked``: what is in none of the files, by key of ours."""

    systems: tuple[System, ...]
    settings: dict[str, Taken]
    pins: dict[str, Taken]
    fates: dict[str, list[str]]
    notes: list[str]
    asked: dict[str, str]

    @property
    def lines(self) -> list[str]:
        """One line a group of keys, then notes."""
        found = []
        for fate, title in FATES.items():
            if names := self.fates[fate]:
                found.append(f"{len(names)} {'key' if len(names) == 1 else 'keys'} {title}: {', '.join(names)}")
        return [*found, *self.notes]


@dataclass
class _Opened:
    path: Path
    entries: dict[str, Said]
    system: System
    notes: list[str] = field(default_factory=list)


def foreign(path: Path) -> bool:
    """Return whether a file is one of another system's: by its suffix, since no recipe is a program, or by its keys. A
    file whose keys cannot be read is not."""
    if path.suffix in (*PROGRAMS, ".toml"):
        return True
    try:
        entries, _ = read_entries(path, {})
    except (OSError, ShardwiseError):
        return False
    return bool(recognise(set(entries)))


def read_files(
    paths: Sequence[Path],
    world: int,
    system: str | None = None,
    *,
    strict: bool = False,
    variables: Mapping[str, str] | None = None,
) -> Imported:
    """Return what the files say together, on so many processes; those whose system cannot be told are of ``system``.
    ``strict``: keys that are left to the plan, or have no effect, are errors; ``variables``: of scripts. Raises
    ConfigError with everything that is refused (IMP001), may change the mathematics and is not known (IMP002), cannot
    be told apart (IMP003), is not in the files (IMP007), or contradicts another file (IMP004)."""
    files = sorted(
        (_open(path, system, variables or {}) for path in paths), key=lambda file: SYSTEMS.index(file.system)
    )
    settings, asked = dict[str, Taken](), dict[str, str]()
    fates: dict[str, list[str]] = {fate: [] for fate in (*FATES, "refused")}
    decided = set[str]()
    notes = list[str]()
    problems = list[Problem]()
    for file in files:
        before = dict(settings)
        found = Import(file.entries, world, settings, fates, [], file.notes, asked, decided)
        _sort(found, file.system)
        file.system.settle(found)
        problems += [_unknown(entry, name) for entry, name in found.unknown]
        problems += [_misspelt(entry, guess, file.system) for entry, guess in found.misspelt]
        problems += _refused(found.refusals, file.system)
        problems += _conflicts(before, settings)
        notes += found.notes
    if said := end_within_warmup(settings):
        notes.append(said)
    asked = {key: why for key, why in (ASKED | asked).items() if key not in settings}
    if "model.config" in settings or "model.config" in asked:
        asked.pop("model.path", None)
    if strict:
        middle = [(key, title) for key, title in FATES.items() if key != "kept"]
        problems += [_not_strict(name, title) for fate, title in middle for name in fates[fate]]
    if problems:
        raise ConfigError(*problems)
    pins = {key: value for key, value in settings.items() if key.startswith(PINS)}
    learned = {key: value for key, value in settings.items() if key not in pins}
    return Imported(tuple(file.system for file in files), learned, pins, fates, notes, asked)


def _open(path: Path, system: str | None, variables: Mapping[str, str]) -> _Opened:
    entries, notes = read_entries(path, variables)
    likely = recognise(set(entries))
    given = None if system is None else named(system)
    if system is not None and given is None:
        fix = f"one of {', '.join(one.name for one in SYSTEMS)}"
        raise ConfigError(Problem("IMP003", f"`--from {system}` names no system that is known", "--from", fix))
    if given is not None and (len(likely) != 1 or likely == [given]):
        return _Opened(path, entries, given, notes)
    if len(likely) == 1:
        return _Opened(path, entries, likely[0], notes)
    names = ", ".join(one.name for one in likely or SYSTEMS)
    if not likely:
        what = f"{path} is of no system that is known by its keys"
        raise ConfigError(Problem("IMP003", what, str(path), f"`--from SYSTEM`, one of {names}"))
    what = f"{path} could be of several systems: {names}"
    raise ConfigError(Problem("IMP003", what, str(path), f"`--from {likely[0].name}`, or another of them"))


def _sort(found: Import, system: System) -> None:
    """Give each key its fate, where its row alone decides."""
    off = tuple(section for section in system.switches if not found.on(f"{section}enabled"))
    for key, entry in list(found.entries.items()):
        if key.startswith(off):
            found.fates["none"].append(key)
            del found.entries[key]
            continue
        row = system.row(key)
        asks = word(entry.value) not in OFF
        guess = system.misspelt(key) if asks and (row is None or system.loosely(key)) else None
        if guess is not None and guess not in found.entries:
            found.fates["unread"].append(key)
            found.misspelt.append((entry, guess))
            continue
        if row is None:
            found.fates["unread"].append(key)
            if asks and MATHEMATICAL.search(key):
                found.refuse(entry, "")
            continue
        if row.fate == "refused":
            harmless = row.harmless(entry.value)
            found.fates["none" if harmless else "refused"].append(key)
            if not harmless:
                found.refuse(entry, row.say)
            continue
        if row.fate in READ and isinstance(entry.value, str) and (open_ := UNKNOWN.search(entry.value)):
            found.unknown.append((entry, open_.group(1) or open_.group(2) or open_.group()))
            found.fates["refused"].append(key)
            found.entries[key] = Said(key, None, entry.where)
            continue
        if row.fate == "kept" and entry.value is not None:
            try:
                found.set(row.ours, row.value(entry.value), key)
            except KeyError:
                found.refuse(entry, f"{show(entry.value)} is none of {', '.join(row.values)}")
        found.fates["kept" if row.fate == "read" else row.fate].append(key)


def _refused(refusals: list[tuple[Said, str]], system: System) -> list[Problem]:
    """One problem a reason, with the keys that have it."""
    reasons: dict[str, list[Said]] = {}
    for entry, say in refusals:
        reasons.setdefault(say, []).append(entry)
    found = []
    for say, entries in reasons.items():
        said = ", ".join(f"`{entry.key}: {show(entry.value)}`" for entry in entries[:NAMED])
        more = f" and {len(entries) - NAMED} more keys" if len(entries) > NAMED else ""
        if say:
            fix = f"leave {'them' if len(entries) > 1 else 'it'} out, and the run is another"
            found.append(Problem("IMP001", f"{said}{more}: {say}", entries[0].where, fix))
        else:
            what = f"{said}{more}: not known of {system.title}, and may change what is learned"
            found.append(Problem("IMP002", what, entries[0].where, "leave out what changes nothing"))
    return found


def _misspelt(entry: Said, guess: str, system: System) -> Problem:
    what = f"`{entry.key}: {show(entry.value)}`: not known of {system.title}"
    return Problem("IMP002", what, entry.where, f"did you mean `{guess}`? Leave it out if not")


def _unknown(entry: Said, name: str) -> Problem:
    what = f"`{entry.key}: {show(entry.value)}`: {name} is not in the file"
    return Problem("IMP007", what, entry.where, f"`--set {name}=VALUE`")


def _conflicts(before: dict[str, Taken], after: dict[str, Taken]) -> list[Problem]:
    """Settings of which two files say different things."""
    found = []
    for key, first in before.items():
        second = after.get(key, first)
        theirs = "default of" not in first.origin and "default of" not in second.origin
        if theirs and first.value != second.value:
            where = f"{first.origin}; {second.origin}"
            found.append(Problem("IMP004", f"two files disagree on `{key}`", where, "change one of the two"))
        elif "default of" in second.origin and "default of" not in first.origin:
            after[key] = first
    return found


def _not_strict(name: str, title: str) -> Problem:
    return Problem("IMP005", f"`{name}` is {title}", "--strict", "leave it out, or leave `--strict` out")
