"""Files of other systems as flat keys with places. Nothing is run, and nothing is read that was not named."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, PolicyError, Problem, ShardwiseError, first_line
from shardwise.interop.programs import read_program
from shardwise.interop.scripts import flag_name, read_flags
from shardwise.interop.system import Said
from shardwise.spec.document import Document, KeyPath, parse, read_text

DEPTH, MOST_KEYS = 32, 10_000
REFERENCE = re.compile(r"\$\{?([\w.]+)\b(?!:)\}?")
PRODUCT = re.compile(r"\$\{multiply:\s*(\d{1,9})\s*,\s*(\d{1,9})\s*\}")


SCRIPTS = (".sh", ".slurm", ".sbatch", ".bash")
PROGRAMS = (*SCRIPTS, ".py")


def read_entries(path: Path, variables: Mapping[str, str]) -> tuple[dict[str, Said], list[str]]:
    """Each key of a YAML, JSON or TOML file, dotted, each flag of a script, or each keyword of a configuration in
    Python, whose ``variables`` may be given, and notes about how it was read. Raises ConfigError CFG007 or IMP007,
    MissingInputError CFG011, or PolicyError SEC001 and SEC002."""
    text = read_text(path)
    if path.suffix in SCRIPTS or text.startswith("#!"):
        return read_flags(text, str(path), variables), []
    if path.suffix == ".py":
        return read_program(text, str(path), variables), []
    document = _document(text, str(path), toml=path.suffix == ".toml")
    if isinstance(document, ShardwiseError):
        raise document
    if not isinstance(document.data, dict):
        what = f"{path} must hold keys and values, got {type(document.data).__name__}"
        raise ConfigError(Problem("CFG007", what, str(path), "name a configuration file"))
    notes = [f"{problem.where}: {problem.what}; the last counts, as there" for problem in document.problems]
    entries = dict[str, Said]()
    _flatten(document.data, (), document, entries)
    if len(entries) > MOST_KEYS:
        what = f"{path} has more than {MOST_KEYS:,} keys (limit)"
        raise PolicyError(Problem("SEC002", what, str(path), "name a configuration file"))
    known = {**entries, **{name: Said(name, value, "--set") for name, value in variables.items()}}
    return {key: _referred(entry, known) for key, entry in entries.items()}, notes


@lru_cache(maxsize=8)
def _document(text: str, name: str, *, toml: bool) -> Document | ShardwiseError:
    """The values of a file, or what is wrong with it: a command asks first whose it is, and then what it says."""
    try:
        return _toml(text, name) if toml else parse(text, name, interpolated=True)
    except ShardwiseError as error:
        return error


def _flatten(value: dict[str, Any], path: KeyPath, document: Document, into: dict[str, Said]) -> None:
    for name, item in value.items():
        here = (*path, name)
        if len(into) > MOST_KEYS:
            return
        if isinstance(item, list) and len(item) == 1 and isinstance(item[0], dict):
            _flatten(item[0], (*here, 0), document, into)
        elif isinstance(item, dict) and item and len(here) < DEPTH:
            _flatten(item, here, document, into)
        else:
            key = ".".join(str(part) for part in here if part != 0).strip()
            key = flag_name(name) if name.startswith("--") else key
            into[key] = Said(key, item, document.place(here))


def _referred(entry: Said, entries: dict[str, Said], depth: int = 0) -> Said:
    """``${batch_size}`` as the value of that key, where the file has it; ``${.lr}`` is of the same section, and
    ``${multiply:4,${.hidden_size}}`` a product."""
    if not isinstance(entry.value, str) or "$" not in entry.value or depth > DEPTH:
        return entry
    whole = REFERENCE.fullmatch(entry.value)
    if whole and (name := _named(whole.group(1), entry.key)) in entries:
        other = _referred(entries[name], entries, depth + 1)
        return Said(entry.key, other.value, entry.where)

    def write(match: re.Match[str]) -> str:
        other = entries.get(name := _named(match.group(1), entry.key))
        return f"${{{name}}}" if other is None else str(_referred(other, entries, depth + 1).value)

    text = REFERENCE.sub(write, entry.value)[:10_000]
    product = PRODUCT.fullmatch(text)
    return Said(entry.key, int(product[1]) * int(product[2]) if product else text, entry.where)


def _named(name: str, key: str) -> str:
    """The key that a reference in ``key`` names: each dot before it is a section up."""
    up = len(name) - len(name.lstrip("."))
    return ".".join([*key.split(".")[:-up], name[up:]]) if up else name


def _toml(text: str, name: str) -> Document:
    try:
        document = Document(name, tomllib.loads(text))
    except (ValueError, RecursionError) as error:
        where = f"{name}: {first_line(error)}"
        raise ConfigError(Problem("CFG007", f"{name} is not valid TOML: {first_line(error)}", where)) from None
    section: tuple[str, ...] = ()
    for index, line in enumerate(text.splitlines(), 1):
        if head := re.match(r"\s*\[\[?\s*([\w.\-\"' ]+?)\s*\]", line):
            section = tuple(part.strip(" \"'") for part in head.group(1).split("."))
            document.lines.setdefault(section, index)
        elif key := re.match(r"\s*([\w.\-]+)\s*=", line):
            document.lines.setdefault((*section, *key.group(1).split(".")), index)
    return document
