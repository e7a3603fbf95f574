"""Reads recipes and plans from files and arguments, strictly: all problems at once, each with its place and a fix."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from shardwise.errors import ConfigError, Problem
from shardwise.spec import complaints, elsewhere
from shardwise.spec.beside_recipe import placed, relative
from shardwise.spec.complaints import COMMAND_LINE
from shardwise.spec.document import Document, KeyPath, parse, read, refuse_interpolation, resolve
from shardwise.spec.emit import emit
from shardwise.spec.finetune import with_defaults
from shardwise.spec.keys import DROP, SHORT, SIZES, Keys, Schema, keys_of, nested, translate
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe
from shardwise.spec.units import read_size, show_bytes

FORMAT = 1
LISTED = 3
"""More renamed keys than these are counted, not listed."""


@dataclass(frozen=True)
class Loaded:
    """A recipe, notices about how it was read, and the place of every key that was given. ``renamed``: a line about
    each key that was read under another name, or left out."""

    recipe: Recipe
    notices: tuple[str, ...]
    given: dict[str, str]
    renamed: tuple[str, ...] = ()

    @property
    def shown(self) -> tuple[str, ...]:
        """The lines that are printed before the plan: of many renamed keys only how many there are."""
        if len(self.renamed) <= LISTED:
            return (*self.notices, *self.renamed)
        ignored = sum("` is ignored: " in line for line in self.renamed)
        counts = f"{len(self.renamed) - ignored} keys are read under the names they have here, {ignored} are ignored"
        return (*self.notices, f"{counts}: `shardwise plan --explain keys` with this recipe lists them")


@dataclass
class _Reading:
    """Settings found so far: canonical key to (value, place). ``needs``: what holds of a key of another system (its
    name and value, its place, the keys of ours, what else to write) once everything has been read."""

    keys: Keys
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)
    needs: list[tuple[str, Any, str, str, str]] = field(default_factory=list)

    def takes(self, key: str, kind: str) -> bool:
        schema = self.keys.leaves[key]
        return any(option.get("type") == kind for option in schema.get("anyOf", [schema]))

    def takes_mapping(self, dotted: str) -> bool:
        """Say whether a mapping is the value of this key, and no section: of a key of ours that takes one, or of a key
        of another system that is answered as a whole."""
        key = self.keys.canonical(dotted)
        return elsewhere.answered_whole(dotted) if key is None else self.takes(key, "object")


@cache
def recipe_schema() -> Schema:
    """The JSON schema of a recipe."""
    return Recipe.model_json_schema()


def load_recipe(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a file with ``key=value`` overrides. Raises ConfigError, MissingInputError or PolicyError."""
    return read_recipe(path, overrides).recipe


def read_recipe(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Loaded:
    """As :func:`load_recipe`, with notices and the place of each given key."""
    reading = _Reading(keys_of(recipe_schema()))
    if path is not None:
        document = read(Path(path))
        mapping = _mapping(document, "recipe")
        reading.problems += document.problems
        for dotted, value, where in _flatten(mapping, (), document, reading):
            _take(reading, dotted, value, where, replace=False)
        run, _ = reading.settings.get("run.name", (None, ""))
        for key, (value, where) in reading.settings.items() if relative(Path(path), run) else ():
            found, words = placed(key, value, Path(path))
            reading.settings[key] = found, where
            reading.notices += words
    return _finished(reading, overrides)


def read_settings(settings: Mapping[str, tuple[Any, str]], overrides: Sequence[str] = ()) -> Loaded:
    """As :func:`read_recipe`, of settings by key, each with the place that it came from."""
    reading = _Reading(keys_of(recipe_schema()), dict(settings))
    return _finished(reading, overrides)


def _finished(reading: _Reading, overrides: Sequence[str]) -> Loaded:
    for override in overrides:
        _override(reading, override)
    _hold(reading)
    _shorten(reading)
    recipe = _validate(reading)
    given = {key: where for key, (_, where) in reading.settings.items()}
    return Loaded(recipe, tuple(reading.notices), given, tuple(reading.renamed))


def _mapping(document: Document, noun: str) -> dict[str, Any]:
    if document.data is None:
        raise ConfigError(Problem("CFG007", f"{document.name} is empty", document.name, f"write a {noun}"))
    if not isinstance(document.data, dict):
        what = f"{document.name} must hold `key: value` lines, got {complaints.show_value(document.data)}"
        raise ConfigError(Problem("CFG007", what, document.name, "start with `train:`"))
    written = document.data.get("format", FORMAT)
    if isinstance(written, bool):
        what = f"`format` must be {FORMAT}, got {complaints.show_value(written)}"
        raise ConfigError(Problem("CFG004", what, document.place(("format",)), f"`format: {FORMAT}`"))
    if isinstance(written, int) and written > FORMAT:
        what = f"written for format {written}, this program reads up to {FORMAT}"
        raise ConfigError(Problem("CFG009", what, document.place(("format",)), "upgrade: pip install -U shardwise"))
    return document.data


def _flatten(
    mapping: dict[str, Any], path: KeyPath, document: Document, reading: _Reading
) -> Iterator[tuple[str, Any, str]]:
    """Leaves as (dotted key as written, value, place). Reports sections that hold no keys."""
    for name, value in mapping.items():
        here = (*path, name)
        dotted, where = ".".join(str(part) for part in here), document.place(here)
        if dotted in reading.keys.sections and not isinstance(value, dict):
            if dotted in SHORT and value is not None:
                yield f"{dotted}.{SHORT[dotted]}", value, where
            elif value is not None:
                what = f"`{dotted}` is a section, got {complaints.show_value(value)}"
                reading.problems.append(Problem("CFG004", what, where, f"indent its keys under `{dotted}:`"))
        elif isinstance(value, dict) and value and not reading.takes_mapping(dotted):
            yield from _flatten(value, here, document, reading)
        elif dotted not in reading.keys.sections:
            yield dotted, value, where


def _take(reading: _Reading, dotted: str, value: Any, where: str, *, replace: bool) -> None:
    """Record one setting under its canonical key; those of a section, or of a single data set of axolotl's, each."""
    if isinstance(value, list) and len(value) == 1 and dotted == "datasets":
        value = value[0]
    if isinstance(value, dict) and value and (dotted in reading.keys.sections or dotted.startswith("datasets")):
        for name, item in value.items():
            _take(reading, f"{dotted}.{name}", item, where, replace=replace)
        return
    key = reading.keys.canonical(dotted)
    answer = None if key else elsewhere.find(dotted)
    meaning = answer.meaning(value) if answer else None
    if answer is not None and meaning is not None:
        ours, colon, setting = meaning.partition(": ")
        if meaning.startswith("=") or not meaning:
            reading.renamed.append(f"{where}: `{dotted}` is ignored: {meaning[1:] or 'that is done in any case'}")
        elif colon:
            reading.renamed.append(f"{where}: `{dotted}: {elsewhere.word(value)}` is read as `{meaning}`")
            _keep(reading, ours, resolve(setting), where, replace=replace)
        else:
            reading.needs.append((dotted, value, where, meaning, answer.fix))
        return
    if key is None:
        reading.problems.append(complaints.unknown_key(dotted, where, reading.keys, answer.fix if answer else None))
        return
    alias, leaf = dotted.rpartition(".")[2], key.rpartition(".")[2]
    if isinstance(value, float) and value > 1 and value.is_integer() and reading.takes(key, "integer"):
        value = int(value)  # 1e3
    value = translate(key, dotted, value)
    unset = value is None and alias != leaf and not reading.takes(key, "null")
    if value is DROP or unset:
        return
    if key != dotted and (alias != leaf or not replace):
        reading.renamed.append(f"{where}: `{dotted}` is read as `{key}`")
    _keep(reading, key, value, where, replace=replace)


def _keep(reading: _Reading, key: str, value: Any, where: str, *, replace: bool) -> None:
    """Record the value of one of our keys. Two systems' names of it may say the same (``adapter: qlora`` beside
    ``load_in_4bit``)."""
    before, first = reading.settings.get(key, (None, ""))
    if first and not replace:
        if repr(before) == repr(value):
            return
        reading.problems.append(Problem("CFG003", f"`{key}` is set twice", f"{first} and {where}", "remove one"))
        return
    if key in SIZES and isinstance(value, str) and (size := read_size(value, SIZES[key])) is not None:
        if SIZES[key] == "tokens":
            reading.notices.append(f"{where}: `{key}` {value} is {size:,} tokens")
        value = size
    reading.settings[key] = (value, where)


def _hold(reading: _Reading) -> None:
    """Check that what other systems' keys say beside ours is so."""
    for dotted, value, where, meaning, fix in reading.needs:
        keys = meaning.removeprefix("-").split()
        given = any(reading.settings.get(key, (None, ""))[0] is not None for key in keys)
        if given == meaning.startswith("-"):
            beside = f"contradicts `{keys[0]}`" if given else f"needs `{keys[0]}`"
            what = f"`{dotted}: {elsewhere.word(value)}` {beside}"
            reading.problems.append(Problem("CFG008", what, where, "drop one of the two" if given else fix))
        else:
            why = f"`{keys[0]}` says it" if given else f"`{keys[0]}` is not given"
            reading.renamed.append(f"{where}: `{dotted}` is ignored: {why}")


def _override(reading: _Reading, argument: str) -> None:
    """One ``key=value`` of the command line; the value is YAML where that reads, else text."""
    dotted, equals, text = argument.partition("=")
    where = f"`{argument}` on {COMMAND_LINE}"
    if not equals:
        reading.problems.append(Problem("CFG007", f"`{argument}` is not key=value", COMMAND_LINE, f"`{argument}=...`"))
        return
    refuse_interpolation(text, where)
    dotted = dotted.strip()
    value = parse(text, where).data if text[:1] in ("[", "{", '"', "'") else resolve(text)
    if dotted in reading.keys.sections and dotted in SHORT and not isinstance(value, dict):
        dotted = f"{dotted}.{SHORT[dotted]}"
    leaves = reading.keys.leaves
    whole = next((key for key in leaves if dotted.startswith(key + ".") and reading.takes(key, "object")), None)
    if whole is not None:
        before = reading.settings.get(whole, ({}, ""))[0]
        value = {**(before if isinstance(before, dict) else {}), dotted[len(whole) + 1 :]: value}
        dotted = whole
    key = reading.keys.canonical(dotted)
    if key == dotted and value is not None and not isinstance(value, (str, list, dict)):
        value = text if _is_text(leaves[key]) else value
    _take(reading, dotted, value, where, replace=True)


def _is_text(schema: Schema) -> bool:
    """Say whether any text is a value of this ``schema``, and no number, true or false is."""
    options = [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]
    free = [option.get("type") == "string" and not {"enum", "const"} & set(option) for option in options]
    return any(free) and not any(option.get("type") in ("integer", "number", "boolean") for option in options)


def _shorten(reading: _Reading) -> None:
    """``--max-steps 5`` on a recipe with 100 steps of warmup is a trial run, not a contradiction: the lengths in the
    file are reduced."""
    steps, where = reading.settings.get("train.max_steps", (None, ""))
    if not isinstance(steps, int) or not where.endswith(COMMAND_LINE):
        return
    for key in ("optim.warmup_steps", "optim.decay_steps"):
        value, place = reading.settings.get(key, (None, ""))
        if isinstance(value, int | float) and value > steps >= 1 and not place.endswith(COMMAND_LINE):
            reading.settings[key] = (steps, place)
            reading.notices.append(f"{place}: `{key}` {value} is reduced to {steps}, the value of train.max_steps")


def _validate(reading: _Reading) -> Recipe:
    problems, sound = reading.problems, dict[str, Any]()
    for key, (value, where) in reading.settings.items():
        if bad := complaints.numbers_out_of_bounds(key, value, where, reading.takes(key, "null")):
            problems += bad
        else:
            sound[key] = value

    def place(path: tuple[str | int, ...]) -> str:
        name = complaints.dotted_name(path)
        for key, (_, where) in reading.settings.items():
            if name == key or name.startswith((key + ".", key + "[")):
                return where
        return name

    try:
        recipe = with_defaults(Recipe.model_validate(nested(sound)))
    except ValidationError as error:
        found = complaints.describe_findings(error.errors(), reading.keys, recipe_schema(), place)
        raise ConfigError(*map(complaints.as_typed, (*problems, *found))) from None
    problems += complaints.cross_check(recipe, lambda key: place((key,)))
    if problems:
        raise ConfigError(*map(complaints.as_typed, problems))
    return recipe


def load_plan(path: str | Path) -> Plan:
    """A plan from the file that :func:`dump_plan` wrote, or that a person edited. As strict as a recipe."""
    document = read(Path(path))
    mapping = _mapping(document, "plan")
    problems = list(document.problems)
    adapter = TypeAdapter(Plan)
    root = adapter.json_schema()
    keys = keys_of(root)
    for path_, dotted, value in _leaves(mapping, (), keys):
        where = document.place(path_)
        if dotted not in keys.leaves and dotted not in keys.sections:
            problems.append(complaints.unknown_key(dotted, where, keys))
        problems += complaints.numbers_out_of_bounds(dotted, value, where, False)
        if path_[0] in ("layout", "batch", "remat") and type(value) is int and value < 1:
            what = f"`{dotted}` must be a whole number ≥ 1, got {value}"
            problems.append(Problem("CFG005", what, where, "give 1 or more"))
    if problems:
        raise ConfigError(*problems)
    try:
        return adapter.validate_json(json.dumps(mapping), strict=True)
    except ValidationError as error:
        raise ConfigError(*complaints.describe_findings(error.errors(), keys, root, document.place)) from None


def _leaves(mapping: dict[str, Any], path: KeyPath, keys: Keys) -> Iterator[tuple[KeyPath, str, Any]]:
    for name, value in mapping.items():
        here = (*path, name)
        dotted = ".".join(str(part) for part in here)
        if dotted in keys.sections and isinstance(value, dict):
            yield from _leaves(value, here, keys)
        else:
            yield here, dotted, value


def dump_plan(plan: Plan) -> str:
    """YAML that :func:`load_plan` reads back equal; reasons and sizes stand beside the values as comments."""

    def comment(path: KeyPath, value: Any) -> str:
        dotted = ".".join(str(part) for part in path)
        if dotted in plan.why:
            return plan.why[dotted]
        sized = path[:2] == ("estimate", "memory") or str(path[-1]).endswith("_bytes")
        return show_bytes(value) if sized and isinstance(value, int) and value >= 1024 else ""

    head = "# A plan: edit any value and run `shardwise train --plan` with it. `why` and `estimate` are for the reader."
    return f"{head}\n{emit(asdict(plan), comment)}"


def dump_settings(settings: Mapping[str, tuple[Any, str]], head: str) -> str:
    """Settings by key as a recipe in YAML, each with where it came from as a comment, after the lines of ``head``."""
    data = nested({key: value for key, (value, _) in sorted(settings.items())})

    def comment(path: KeyPath, value: Any) -> str:
        return settings.get(".".join(map(str, path)), (None, ""))[1]

    return "".join(f"# {line}\n" for line in head.splitlines()) + emit(data, comment)


def dump_recipe(recipe: Recipe) -> str:
    """Every key with its value, as YAML that :func:`load_recipe` reads back equal."""
    return emit(recipe.model_dump(mode="python"), lambda path, value: "")
