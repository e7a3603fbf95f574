"""``shardwise import``: other systems' files as a recipe, which says of each line where it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from typer import Option

from shardwise.cli.imported import Foreign, given
from shardwise.cli.options import Common, RecipeWords, misused, sort_words
from shardwise.cli.show import note, print_json, say
from shardwise.launch.rundir import check_new
from shardwise.spec.keys import dotted
from shardwise.spec.load import dump_settings


@dataclass
class Options(Foreign, Common):
    """Write a recipe from the files of other systems: axolotl, TRL, DeepSpeed, Accelerate and others.

    Each line says where it came from. Several files are read together: an accelerate YAML and a script's arguments.
    """

    arguments: RecipeWords = field(default_factory=list)
    cluster: Annotated[
        str | None, Option("--cluster", help="The machines: batches depend on how many ranks there are.")
    ] = None
    pinned: Annotated[bool, Option("--pinned", help="Keep their split too, which is the plan's to choose.")] = False
    out: Annotated[Path | None, Option("-o", "--out", "--output", help="Write the recipe to this file.")] = None


def run(options: Options) -> None:
    """Print the recipe, or write it."""
    words = sort_words(options.arguments, Options, several=True)
    if not words.files:
        raise misused("no file to import", "`shardwise import config.yaml -o recipe.yaml`")
    found = given(words, options.cluster, options, data=False)
    imported = found.imported
    if imported is None:
        raise misused(f"{words.path} is a recipe already", "`shardwise plan` reads it, or `--from SYSTEM`")
    kept = found.pinned if options.pinned and found.pinned else found.loaded
    values = dotted(kept.recipe.model_dump(mode="json"))
    settings = {key: (values[key], where) for key, where in kept.given.items() if key in values}
    if options.json:
        values = {key: {"value": value, "from": where} for key, (value, where) in settings.items()}
        return print_json({"settings": values, "keys": imported.fates, "notes": imported.notes})
    for line in imported.lines:
        note(line, as_json=False)
    names = ", ".join(map(str, words.files))
    text = dump_settings(settings, f"Imported from {names} ({', '.join(one.title for one in imported.systems)}).")
    if options.out is None:
        return say(text.rstrip())
    check_new(options.out)
    options.out.write_text(text, encoding="utf-8")
    return say(f"written: {options.out}        next: shardwise plan {options.out}")
