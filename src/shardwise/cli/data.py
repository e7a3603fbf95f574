"""``shardwise data prepare``: tokenise before training, without any process group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.errors import Problem, UsageError
from shardwise.spec.load import load_recipe

if TYPE_CHECKING:
    from rich.progress import Progress

    from shardwise.data.store import Prepared

app = typer.Typer(help="Prepare text for training.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Prepare text for training."""


@app.command()
def prepare(
    arguments: Annotated[list[str] | None, typer.Argument(help="[recipe.yaml] [key=value ...]")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory to write; left out: the cache.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Make it anew even if it is there.")] = False,
) -> None:
    """Tokenise the data of a recipe into memory-mapped shards, in parallel, with checksums."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from shardwise.data.prepare import prepare as prepare_data

    words = arguments or []
    recipe_paths = [word for word in words if "=" not in word]
    if len(recipe_paths) > 1:
        fix = "shardwise data prepare recipe.yaml data.path=corpus/"
        raise UsageError(Problem("USE001", f"more than one recipe: {' '.join(recipe_paths)}", "the command line", fix))
    overrides = [word for word in words if "=" in word]
    recipe = load_recipe(recipe_paths[0] if recipe_paths else None, overrides)
    columns = (TextColumn("{task.description:<10}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        prepared = prepare_data(recipe.data, out, force, _Stages(bar))
    typer.echo(describe(prepared))


class _Stages:
    """One bar for each stage, as stages are told of."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar
        self.tasks: dict[str, Any] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self.tasks:
            self.tasks[stage] = self.bar.add_task(stage, total=total)
        self.bar.update(self.tasks[stage], completed=done)


def describe(prepared: Prepared) -> str:
    """What was prepared, in a few lines."""
    manifest = prepared.manifest
    lines = [
        f"{name:<11} {split.tokens:,} tokens in {split.documents:,} documents, {split.text_bytes / 1e6:,.1f} MB of text"
        for name, split in manifest.splits.items()
    ]
    if manifest.empty_documents:
        lines.append(f"left out    {manifest.empty_documents:,} empty documents")
    lines += [
        f"tokenizer   {manifest.vocab_size:,} ids, end-of-text {manifest.eot_id}, hash {manifest.tokenizer_hash[:8]}",
        f"directory   {prepared.directory}",
    ]
    return "\n".join(lines)
