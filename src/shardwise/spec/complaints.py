"""Invalid values as Problems, in the recipe's terms: pydantic's findings and cross-checks between settings."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.errors import Problem
from shardwise.spec.keys import MEANT, Keys, Schema, alias_leaf, describe, near, resolve_reference
from shardwise.spec.methods import METHODS, PREFERENCE, SFT_ONLY, in_words
from shardwise.spec.recipe import Recipe, Section
from shardwise.spec.records import over_the_end
from shardwise.spec.schedules import SCHEDULES

COMMAND_LINE = "the command line"
_RANGE = {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "literal_error"}
Place = Callable[[tuple[str | int, ...]], str]
"""From the path of a value to ``file:line``, or to the argument that set it."""


def show_value(value: Any) -> str:
    """A value as it is named in a message; text is quoted, long text cut, control characters escaped."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        cut = value if len(value) <= 60 else value[:57] + "..."
        return 'text "' + cut.encode("unicode_escape").decode() + '"'
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, Sequence):
        items = [show_value(item) for item in value[:4]]
        return f"a list ({', '.join(items)}{', ...' if len(value) > 4 else ''})" if items else "an empty list"
    return f"{value:g}" if isinstance(value, float) else str(value)


def as_typed(problem: Problem) -> Problem:
    """Type the fix of a problem as the mistake was: ``key=value`` for the command line, ``key: value`` for a file."""
    if not problem.where.endswith(COMMAND_LINE):
        return problem
    fix = re.sub(r"`([a-z_.]+): ([^`]+)`", lambda found: f"`{found[1]}={shlex.quote(found[2])}`", problem.fix)
    return replace(problem, fix=fix)


def unknown_key(dotted: str, where: str, keys: Keys, fix: str | None = None) -> Problem:
    """CFG001. ``fix``: a better one than the nearest key."""
    if dotted in keys.sections:
        there = [key for key in keys.leaves if key.startswith(f"{dotted}.")]
        what = f"`{dotted}` is a section, not a key"
        return Problem("CFG001", what, where, f"name one of its keys: {', '.join(there)}")
    guess, homes = keys.nearest(dotted), keys.homes(dotted)
    section = dotted.rpartition(".")[0]
    there = [key for key in keys.leaves if section and key.rpartition(".")[0] == section]
    known = f"there are {', '.join(f'`{key}`' for key in there)}" if there else "`shardwise schema` lists every key"
    told = f"did you mean `{guess}`?" if guess else f"remove it; {known}"
    if len(homes) > 1:
        told = f"in full: {' or '.join(f'`{key}`' for key in homes)}"
    return Problem("CFG001", f"unknown key `{dotted}`", where, fix or told)


def numbers_out_of_bounds(key: str, value: Any, where: str, nullable: bool) -> list[Problem]:
    """NaN and infinity (CFG006), and whole numbers beyond 64 bits (CFG005), anywhere inside ``value``."""
    if isinstance(value, float) and not math.isfinite(value):
        name = "NaN" if math.isnan(value) else "infinite"
        fix = "use a finite number" + (", or null to turn it off" if nullable else "")
        return [Problem("CFG006", f"`{key}` is {name}", where, fix)]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return [Problem("CFG005", f"`{key}` does not fit 64 bits", where, "use a smaller number")]
    if isinstance(value, Mapping):
        return [p for k, v in value.items() for p in numbers_out_of_bounds(f"{key}.{k}", v, where, False)]
    if isinstance(value, list):
        return [p for i, v in enumerate(value) for p in numbers_out_of_bounds(f"{key}[{i}]", v, where, False)]
    return []


def describe_findings(errors: Sequence[Mapping[str, Any]], keys: Keys, root: Schema, place: Place) -> list[Problem]:
    """One Problem for each value that pydantic found wrong, however many findings a union gave for it."""
    grouped: dict[tuple[str | int, ...], tuple[Schema, list[Mapping[str, Any]]]] = {}
    for error in errors:
        path, schema = _locate(tuple(error["loc"]), keys, root)
        grouped.setdefault(path, (schema, []))[1].append(error)
    return [_complain(path, schema, found, root, place(path)) for path, (schema, found) in grouped.items()]


def _locate(loc: tuple[str | int, ...], keys: Keys, root: Schema) -> tuple[tuple[str | int, ...], Schema]:
    """The path of the value and its schema; what follows in ``loc`` are names of a union's members."""
    schema: Schema = root
    path: list[str | int] = []
    for part in loc:
        step = resolve_reference(schema, root)
        if isinstance(part, int) and "items" in step:
            schema = step["items"]
        elif isinstance(part, str) and part in step.get("properties", {}):
            schema = step["properties"][part]
        elif isinstance(part, str) and isinstance(step.get("additionalProperties"), dict):
            schema = step["additionalProperties"]
        elif isinstance(part, str) and "properties" in step:
            path.append(part)
            return tuple(path), step
        else:
            break
        path.append(part)
    return tuple(path), resolve_reference(schema, root)


def dotted_name(path: tuple[str | int, ...]) -> str:
    """``optim.groups[0].pattern``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def _complain(
    path: tuple[str | int, ...], schema: Schema, found: list[Mapping[str, Any]], root: Schema, where: str
) -> Problem:
    name, value = dotted_name(path), found[0]["input"]
    types = {error["type"] for error in found}
    if types & {"extra_forbidden", "unexpected_keyword_argument"}:
        guess = near(alias_leaf(str(path[-1])), schema.get("properties", {}))
        there = ", ".join(schema.get("properties", {}))
        fix = f"did you mean `{guess}`?" if guess else f"remove it; the keys here are {there}"
        return Problem("CFG001", f"unknown key `{name}`", where, fix)
    words = describe(schema, root)
    if types & {"missing", "missing_argument"}:
        return Problem("CFG004", f"`{name}` is missing; it must be {words}", where, f"add `{path[-1]}`")
    fix = f"give {words}"
    choices = [str(option) for option in _choices(schema)]
    if isinstance(value, str) and (guess := near(value, choices)):
        fix = f"did you mean `{guess}`?"
    fix = MEANT.get(name, {}).get(str(value).lower(), fix)
    return Problem(_code(types, schema, value), f"`{name}` must be {words}, got {show_value(value)}", where, fix)


def _code(types: set[str], schema: Schema, value: Any) -> str:
    options = schema.get("anyOf", [schema])
    numeric = any(option.get("type") in ("integer", "number") for option in options)
    if isinstance(value, str) and numeric and not _choices(schema):
        return "CFG002"
    in_kind = types & _RANGE and (isinstance(value, str) or not types <= {"literal_error"})
    return "CFG005" if in_kind else "CFG004"


def _choices(schema: Schema) -> list[Any]:
    found: list[Any] = []
    for option in schema.get("anyOf", [schema]):
        found += option.get("enum", []) + ([option["const"]] if "const" in option else [])
    return found


def cross_check(recipe: Recipe, place: Callable[[str], str]) -> list[Problem]:
    """Settings that contradict each other, within a section and between them. ``place`` takes a dotted key."""
    train, optim = recipe.train, recipe.optim
    problems: list[Problem] = []

    def exceeds(key: str, value: float | None, other: str, limit: float | None) -> None:
        if value is not None and limit is not None and value > limit:
            name, other_name = key.rpartition(".")[2], other.rpartition(".")[2]
            what = f"`{name}` {value:g} exceeds `{other_name}` {limit:g}"
            problems.append(Problem("CFG005", what, place(key), f"`{key}: {limit:g}` or less, or a larger `{other}`"))

    def refuse(wrong: bool, key: str, what: str, fix: str, code: str = "CFG008") -> None:
        if wrong:
            problems.append(Problem(code, what, place(key), fix))

    exceeds("optim.warmup_steps", optim.warmup_steps, "train.max_steps", train.max_steps)
    if SCHEDULES[optim.schedule].span is over_the_end:  # of others the run may end before the fall does
        exceeds("optim.decay_steps", optim.decay_steps, "train.max_steps", train.max_steps)
    exceeds("optim.warmup_from", optim.warmup_from, "optim.learning_rate", optim.learning_rate)
    exceeds("optim.min_learning_rate", optim.min_learning_rate, "optim.learning_rate", optim.learning_rate)
    whole, micro = train.global_batch_size or 0, train.micro_batch_size or 1
    accumulation = train.gradient_accumulation_steps or 1
    unit = micro * accumulation
    what = f"global_batch_size {whole} is not a multiple of micro {micro} × accumulation {accumulation} = {unit}"
    fix = f"`train.global_batch_size: {-(-whole // unit) * unit}`, or drop one of the three"
    refuse(whole % unit != 0, "train.global_batch_size", what, fix)
    data = recipe.data
    for section in (section for _, section in recipe if isinstance(section, Section)):
        problems += [replace(problem, where=place(problem.where)) for problem in section.contradictions()]
    theirs = sorted(data.model_dump(include=SFT_ONLY, exclude_defaults=True))
    if theirs and recipe.sample_tokens is None:
        readers = in_words(spec for spec in METHODS.values() if spec.records)
        what = f"`data.{theirs[0]}` is for {readers}, but the method is {recipe.method.name}"
        problems.append(Problem("CFG008", what, place(f"data.{theirs[0]}"), "`method: sft`, or leave it out"))
    what = "`data.mask_documents: false` would let one conversation attend to another"
    refuse(recipe.sample_tokens is not None and not data.mask_documents, "data.mask_documents", what, "leave it out")
    problems += [*_check_intervals(recipe, place), *_check_method(recipe, place), *_check_streaming(recipe, place)]
    problems += _check_added(recipe, place)
    narrow = recipe.precision
    told = {"scales": narrow.scales != "block", "exclude": bool(narrow.exclude), "gather": narrow.gather != "compute"}
    for key in (key for key, said in told.items() if said and narrow.products == "compute"):
        what = f"`precision.{key}` is of products in float8, and they are in the dtype of `precision.compute`"
        problems.append(Problem("CFG008", what, place(f"precision.{key}"), "`precision.products: float8`"))
    run, key = recipe.run, "run.profile_steps"
    what = f"`{key}` must be FIRST:LAST, from 1, got {show_value(run.profile_steps)}"
    refuse(run.profile_steps is not None and not run.profiled, key, what, f"`{key}: 10:12`", "CFG005")
    return problems


def _check_added(recipe: Recipe, place: Callable[[str], str]) -> Iterator[Problem]:
    """Tokens that are added to a tokenizer."""
    data = recipe.data
    both = [*data.add_tokens, *data.add_special_tokens]
    for where, texts, others in (
        ("data.add_tokens", data.add_tokens, []),
        ("data.add_special_tokens", data.add_special_tokens, data.add_tokens),
    ):
        own = [text for text in dict.fromkeys(texts) if text and text not in others]
        if own != texts:
            what = f"each added token is a text of its own, got {show_value(both)}"
            yield Problem("CFG005", what, place(where), f"`{where}: [{', '.join(own)}]`" if own else "leave it out")
    where = "data.add_tokens" if data.add_tokens else "data.add_special_tokens"
    named, given = data.tokenizer, recipe.model.path is not None and recipe.model.init != "random"
    if both and named.path is None and (named.vocab_size is not None or not given):
        what = f"`{where}` adds to a tokenizer that there is, and this one is trained on the data"
        yield Problem("CFG008", what, place(where), "`data.tokenizer.path`, or leave it out")


def _check_intervals(recipe: Recipe, place: Callable[[str], str]) -> Iterator[Problem]:
    """Yield what is wrong with how often it saves and validates, and with what depends on the validation loss."""
    save = recipe.checkpoint
    evaluate = recipe.evaluate
    data = recipe.data
    for steps, every, key, per_epoch in (
        ("checkpoint.save_steps", save.save_steps, "checkpoint.saves_per_epoch", save.saves_per_epoch),
        ("evaluate.eval_steps", evaluate.eval_steps, "evaluate.evals_per_epoch", evaluate.evals_per_epoch),
    ):
        if every is not None and per_epoch is not None:
            what = f"`{steps}` and `{key}` both set the interval"
            yield Problem("CFG008", what, place(key), "drop one of the two")
    for key in recipe.judged:
        if evaluate.eval_steps is None and evaluate.evals_per_epoch is None:
            what = f"`{key}` needs validation at intervals"
            yield Problem("CFG008", what, place(key), "`evaluate.eval_steps: 100`")
        if not data.validation_share and data.validation_path is None:
            what = f"`{key}` needs a validation loss, but no validation data are held out"
            yield Problem("CFG008", what, place(key), "`data.validation_share: 0.05`")


def _check_method(recipe: Recipe, place: Callable[[str], str]) -> Iterator[Problem]:
    """Settings that the method does not read."""
    method, data = recipe.method, recipe.data
    given = method.model_dump(exclude={"name"}, exclude_defaults=True)
    readers = {f"method.{key}": [spec for spec in METHODS.values() if key in spec.options] for key in given}
    if data.format == PREFERENCE:
        readers["data.format"] = [spec for spec in METHODS.values() if spec.pairs]
    for key, those in readers.items():
        if method.spec not in those:
            what = f"`{key}` is for {in_words(those)}, but the method is {method.name}"
            yield Problem("CFG008", what, place(key), f"`method.name: {those[0].name}`, or leave it out")
    unread = {"data.format": data.format not in ("auto", PREFERENCE), "data.train_on": data.train_on != "assistant"}
    what = f"does not apply to `method: {method.name}`, which trains on `chosen` and `rejected`"
    for key in (key for key, wrong in unread.items() if wrong and recipe.pairs):
        yield Problem("CFG008", f"`{key}` {what}", place(key), "leave it out")


def _check_streaming(recipe: Recipe, place: Callable[[str], str]) -> list[Problem]:
    """Return what cannot be combined with text of unknown length, and what that needs."""
    given = {
        "train.num_epochs": recipe.train.num_epochs,
        "checkpoint.saves_per_epoch": recipe.checkpoint.saves_per_epoch,
        "evaluate.evals_per_epoch": recipe.evaluate.evals_per_epoch,
        "data.mixture_weights": recipe.data.mixture_weights,
    }
    refused = [key for key, value in given.items() if value is not None] + ["method.name"] * recipe.pairs
    what, fix = "cannot be combined with `data.streaming`", "leave one of the two out"
    problems = [Problem("CFG008", f"`{key}` {what}", place(key), fix) for key in refused]
    if recipe.train.max_steps is None:
        what = "`train.max_steps` is missing: with `data.streaming` the length of the text is not known in advance"
        problems.append(Problem("CFG004", what, place("data.streaming"), "`train.max_steps: 10k`"))
    return problems if recipe.data.streaming else []
