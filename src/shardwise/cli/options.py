"""Commands declared as one dataclass of options each, and the free order of flags and ``key=value``."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from shardwise.errors import MissingInputError, Problem, UsageError
from shardwise.spec.cluster import Cluster
from shardwise.spec.cluster_file import LOCAL, machines
from shardwise.spec.keys import Keys, keys_of, near
from shardwise.spec.load import recipe_schema
from shardwise.spec.shipped import recipes_directory
from shardwise.spec.units import typed

DataWords = Annotated[
    list[str],
    typer.Argument(metavar="[RECIPE] [KEY=VALUE ...]", help="A recipe (default: the quickstart's data) and settings."),
]
RecipeWords = Annotated[list[str], typer.Argument(metavar="[RECIPE.yaml] [key=value ...]", show_default=False)]
LOOSE = {"ignore_unknown_options": True, "allow_extra_args": False}
"""Flags that are not declared are keys of the recipe: ``--seq-len 4096``."""


@dataclass(kw_only=True)
class Common:
    """The options of nearly every command; in its help they come last."""

    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False


def add_command(
    app: typer.Typer, options: type, run: Callable[[Any], int | None], name: str, *, loose: bool = True
) -> None:
    """Register ``run`` as a command whose parameters are the fields of the dataclass ``options``."""
    hints = get_type_hints(options, include_extras=True)

    def command(**values: Any) -> int | None:
        return run(options(**values))

    parameters, kind = [], inspect.Parameter.KEYWORD_ONLY
    for item in sorted(fields(options), key=lambda item: bool(item.kw_only)):
        default = inspect.Parameter.empty if item.default is MISSING else item.default
        default = default if item.default_factory is MISSING else []
        parameters.append(inspect.Parameter(item.name, kind, default=default, annotation=hints[item.name]))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = hints
    command.__doc__ = options.__doc__
    app.command(name, context_settings=LOOSE if loose else None, cls=PanelCommand)(command)


class PanelCommand(TyperCommand):
    """A command whose help has the options of a panel below its name."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(ctx):
            if (told := each.get_help_record(ctx)) is not None:
                kind = "Arguments" if each.param_type_name == "argument" else "Options"
                groups.setdefault(vars(each).get("rich_help_panel") or kind, []).append(told)
        for head, records in groups.items():
            with formatter.section(head):
                formatter.write_dl(records)


@dataclass
class Words:
    """The free words of a command line: the file or directory it names, and settings of the recipe."""

    path: Path | None = None
    overrides: list[str] = field(default_factory=list)
    more: list[Path] = field(default_factory=list)

    @property
    def files(self) -> list[Path]:
        """Every file that was named."""
        return [*filter(None, [self.path]), *self.more]


def sort_words(words: list[str], options: type | None = None, *, several: bool = False) -> Words:
    """Separate the recipe from ``key=value`` and ``--key value``. A mistyped one of the command's own ``options`` is
    recognised. ``several``: other systems' files may be more than one. Raises UsageError (CLI001) or MissingInputError
    (CFG011)."""
    own = [field.name for field in fields(options)] if options else []
    keys = keys_of(recipe_schema())
    found = Words()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--") and len(word) > 2:
            found.overrides.append(_flag(word[2:], rest, keys, own))
        elif word.startswith("-") and len(word) > 1 and not os.path.exists(word):
            raise misused(f"unknown option `{word}`", "`shardwise --help` lists them")
        elif "=" in word and not os.path.exists(word):
            found.overrides.append(word)
        elif found.path is None:
            found.path = Path(word)
        elif several:
            found.more.append(Path(word))
        else:
            raise misused(f"two recipes: `{found.path}` and `{word}`", "name one; settings are written key=value")
    for asked in (word.partition("=")[2] for word in found.overrides if word.startswith("cluster=")):
        what = f"`{asked}`: only `shardwise plan` takes other machines; this command runs on this one"
        raise misused(what, _machines(asked))
    return found


def _machines(text: str) -> str:
    """Return what to write instead of ``--cluster`` for a command other than `plan`."""
    if text == LOCAL:
        return "leave it out"
    here = " ".join(machine_words(machines(text)))
    return f"`{here}` to run on such machines, `shardwise plan --cluster {typed(text)}` to plan for them"


def machine_words(cluster: Cluster) -> list[str]:
    """The settings with which `train` runs on these machines."""
    several = [f"run.nodes={cluster.nodes}"] if cluster.nodes > 1 else []
    return [f"run.device={cluster.kind}", f"run.nproc={cluster.devices_per_node}", *several]


def misused(what: str, fix: str, where: str = "the command line") -> UsageError:
    """CLI001, for words of a command line that cannot be meant."""
    return UsageError(Problem("CLI001", what, where, fix))


def _flag(text: str, rest: list[str], keys: Keys, own: list[str]) -> str:
    """``--seq-len 8k``, ``--seq-len=8k``, ``--compile`` as ``key=value``; the value of a yes-or-no key may be left
    out."""
    name, equals, value = text.partition("=")
    name = name.replace("-", "_")
    key = keys.meant(name)
    if key is None and (option := near(name, own)):
        raise misused(f"unknown option `--{text.partition('=')[0]}`", f"did you mean `--{option.replace('_', '-')}`?")
    if equals:
        return f"{name}={value}"
    if "boolean" in keys.types(key or "") and not (rest and rest[0] in ("true", "false", "auto")):
        return f"{name}=true"
    if not rest or rest[0].startswith("--"):
        if key is None:
            guess = keys.nearest(name)
            fix = f"did you mean `--{guess.replace('_', '-')}`?" if guess else "`shardwise --help` lists them"
            raise misused(f"unknown option `--{text}`", fix)
        raise misused(f"`--{text}` needs a value", f"`--{text} VALUE`")
    return f"{name}={rest.pop(0)}"


def recipe_file(path: Path) -> Path:
    """The recipe that ``path`` names: a file, a run directory, or one that ships with the package (``quickstart``)."""
    if os.path.isdir(path):
        if not os.path.isfile(path / "recipe.yaml"):
            fix = "name a recipe, or a run directory with a recipe.yaml"
            raise MissingInputError(Problem("CFG011", f"{path} holds no regular file recipe.yaml", str(path), fix))
        return path / "recipe.yaml"
    if os.path.exists(path) or path.parent != Path("."):
        return path
    known, name = {each.stem: each for each in recipes_directory().glob("*.yaml")}, path.name.removesuffix(".yaml")
    if name not in known and (meant := near(name, known)):
        what = f"cannot read {path}: no such file, and no recipe that ships has this name"
        raise MissingInputError(Problem("CFG011", what, fix=f"did you mean `{meant}`?"))
    return known.get(name, path)


def recipe_or_quickstart(path: Path | None, overrides: list[str]) -> Path | None:
    """The recipe that was named; without one the quickstart, unless the settings name another model."""
    another = ("model=", "model.path=", "base_model=", "model_name_or_path=")
    if path is None and any(word.startswith(another) for word in overrides):
        return None
    return recipe_file(path or Path("quickstart"))
