"""Recipes, or the files of other systems in their place."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from shardwise.cli import render
from shardwise.cli.decide import cluster_of
from shardwise.cli.options import Words, misused, recipe_or_quickstart
from shardwise.cli.planned import Planned, planned
from shardwise.errors import ConfigError, Problem
from shardwise.interop.imports import FATES, Imported, foreign, read_files
from shardwise.interop.programs import CHOICE
from shardwise.interop.system import Taken
from shardwise.planner.comparison import seconds, tokens_per_s
from shardwise.spec.document import read_text
from shardwise.spec.explain import label
from shardwise.spec.load import Loaded, load_recipe, read_recipe, read_settings
from shardwise.spec.recipe import Recipe
from shardwise.spec.units import columns, show_seconds

NEEDED = {
    "model.path": "`model=org/name`",
    "model.config": "`model.config.vocab_size=32000`",
    "train.seq_len": "`seq_len=4096`",
    "data.path": "`data=file.jsonl`",
}
"""What files may leave out, and how it is given."""
MACHINES = ("run.nproc=", "run.nodes=", "run.device=", "nproc=", "nodes=", "device=")


@dataclass(frozen=True)
class GivenRecipe:
    """A command was given this: a recipe, or other systems' files as one. ``pinned``: these with their own split, which
    ``loaded`` leaves to the plan."""

    loaded: Loaded
    path: Path | None
    imported: Imported | None = None
    pinned: Loaded | None = None


@dataclass(kw_only=True)
class Foreign:
    """The options that say how the files of other systems are read."""

    system: Annotated[
        str | None, Option("--from", help="Whose files they are (axolotl, trl, deepspeed ...), where it could be two.")
    ] = None
    set: Annotated[list[str], Option("--set", metavar="NAME=VALUE", help="A variable of their script or program.")] = (
        field(default_factory=list)
    )
    strict: Annotated[
        bool, Option("--strict", help="Refuse another system's keys that have no effect here, or are left to the plan.")
    ] = False


def given(words: Words, cluster: str | None, files: Foreign, *, data: bool = True) -> GivenRecipe:
    """The recipe that ``words`` name, or what other systems' ``files`` say on such machines. ``data``: whether the
    command needs data, which a plan does not. Raises ConfigError (IMP001 to IMP006), and what a recipe raises."""
    theirs = [path for path in words.files if os.path.isfile(path) and (files.system is not None or foreign(path))]
    if not theirs:
        if files.set:
            what = f"`--set {files.set[0]}` is for a variable of another system's script, and none is named"
            raise misused(what, f"`{files.set[0]}` without `--set`: settings are written key=value")
        if words.more:
            what = f"two recipes: `{words.path}` and `{words.more[0]}`"
            raise misused(what, "name one; settings are written key=value")
        path = recipe_or_quickstart(words.path, words.overrides)
        return GivenRecipe(read_recipe(path, words.overrides), path)
    for path in words.files:
        if path not in theirs:
            what = f"{path} is not a file of another system, as {theirs[0]} is"
            raise misused(what, "`--from SYSTEM`, or leave it out: settings of ours are written key=value")
    here = [word for word in words.overrides if word.startswith(MACHINES)]
    world = cluster_of(load_recipe(None, here), cluster).world
    if empty := [word for word in files.set if not word.partition("=")[2]]:
        raise misused(f"`--set {empty[0]}` gives no value", "`--set NAME=VALUE`")
    variables = dict(word.partition("=")[::2] for word in files.set)
    check_variables(theirs, variables)
    imported = read_files(theirs, world, files.system, strict=files.strict, variables=variables)
    learned = read_settings(as_given(imported.settings), words.overrides)
    ask(imported, learned, data=data)
    pinned = read_settings(as_given(imported.settings | imported.pins), words.overrides)
    return GivenRecipe(learned, theirs[0], imported, pinned)


def check_variables(files: list[Path], variables: Mapping[str, str]) -> None:
    """Raise UsageError (CLI001) for a variable that is no word of any of the files; of a dotted one, which a program or
    a relative reference spells otherwise, for its last part."""
    words = {word for path in files for word in re.findall(r"\w+", read_text(path))} if variables else set()
    if absent := [name for name in variables if name != CHOICE and name.rpartition(".")[2] not in words]:
        raise misused(f"`--set {absent[0]}`: no such word in {' or '.join(map(str, files))}", "a variable of the file")


def ask(imported: Imported, found: Loaded, *, data: bool) -> None:
    """Raise ConfigError (IMP006) for all that is neither in the files nor on the command line, at once."""
    missing = [key for key in imported.asked if key not in found.given and (data or key != "data.path")]
    if missing:
        problems = [
            Problem("IMP006", f"the files do not say {imported.asked[key]}", "the files", f"add {NEEDED[key]}")
            for key in missing
        ]
        raise ConfigError(*problems)


def as_given(settings: dict[str, Taken]) -> dict[str, tuple[Any, str]]:
    """Settings with the places they came from."""
    return {key: (setting.value, setting.origin) for key, setting in settings.items()}


def beside_theirs(answer: Planned, imported: Imported, pinned: Recipe, *, keys: bool) -> list[str]:
    """Return how the files were read, and the split that they pin beside the best that learns the same."""
    titles = " and ".join(dict.fromkeys(system.title for system in imported.systems))
    counts = [f"{len(names)} {FATES[fate]}" for fate, names in imported.fates.items() if names and fate in FATES]
    lines = [f"keys of {titles}: {', '.join(counts)}" + ("" if keys else "        --explain keys lists them")]
    unread = [f"not read: {', '.join(imported.fates['unread'])}"] if imported.fates["unread"] else []
    lines += [f"  {line}" for line in (imported.lines if keys else [*unread, *imported.notes])]
    rows = []
    try:
        theirs = planned(pinned, answer.spec, answer.cluster, answer.asked, here=answer.here).best
    except ConfigError as error:
        lines += [f"it cannot be split as {titles} pins it: {problem.what}" for problem in error.problems]
        return [*lines, ""]
    for title, plan in ((f"split by {titles}", theirs), ("best, and learns the same", answer.best)):
        figures = f"{show_seconds(seconds(plan).step_s)} a step", f"{tokens_per_s(plan):,.0f} tokens/s"
        rows.append((title, label(plan), *figures, render.verdict(plan.estimate)))
    return [*lines, *columns(rows, "<<>><"), ""]
