"""``shardwise schema``: what a recipe may say, for editors and programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from shardwise.cli.show import print_json, say
from shardwise.spec.keys import describe, keys_of, other_names
from shardwise.spec.load import recipe_schema


@dataclass
class Options:
    """Print the JSON schema of a recipe, or with --keys one line for each key."""

    keys: Annotated[bool, Option("--keys", help="One line for each key: what it takes, and its default.")] = False
    json: Annotated[bool, Option("--json", help="JSON (the default).")] = False
    debug: Annotated[bool, Option("--debug", help="Show tracebacks.")] = False


def run(options: Options) -> None:
    """Print the schema."""
    schema = recipe_schema()
    if not options.keys:
        return print_json(schema)
    names = other_names()
    for key, value in sorted(keys_of(schema).leaves.items()):
        default = f" (default {_written(value['default'])})" if value.get("default") is not None else ""
        also = f"; also {', '.join(names[key])}" if key in names else ""
        say(f"{key}: {describe(value, schema)}{default}{also}")
    return None


def _written(value: object) -> str:
    """Write a value as YAML has it: ``true``, not ``True``."""
    return str(value).lower() if isinstance(value, bool) else str(value)
