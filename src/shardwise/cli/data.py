"""``shardwise data prepare``: tokenise before training, without any process group. And ``data preview``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option, Typer

from shardwise.cli import preview
from shardwise.cli.options import Common, DataWords, add_command, recipe_or_quickstart, sort_words
from shardwise.cli.show import print_json, say
from shardwise.models.resolve import data_of
from shardwise.spec.load import load_recipe
from shardwise.spec.units import counted

if TYPE_CHECKING:
    from rich.progress import Progress

    from shardwise.data.store import Prepared

app = Typer(help="Prepare text for training.", add_completion=False, rich_markup_mode=None)


@dataclass
class Options(Common):
    """Tokenise the data of a recipe into memory-mapped shards with checksums, in parallel."""

    words: DataWords = field(default_factory=list)
    out: Annotated[
        Path | None, Option("-o", "--out", "--output", help="Directory to write to (default: the cache).")
    ] = None
    force: Annotated[bool, Option("--force", help="Prepare the data again even if they exist.")] = False


def run(options: Options) -> None:
    """Prepare, with a bar a stage on a terminal, and say what was made."""
    from shardwise.data.prepare import prepare

    words = sort_words(options.words)
    recipe = load_recipe(recipe_or_quickstart(words.path, words.overrides), words.overrides)
    with stages(hidden=options.json) as said:
        prepared = prepare(data_of(recipe), options.out, options.force, said, recipe.sample_tokens)
    prepared.verify()
    if options.json:
        splits = {name: asdict(split) for name, split in prepared.manifest.splits.items()}
        facts: dict[str, Any] = {"counts": prepared.manifest.counts}
        facts |= {"fingerprint": prepared.manifest.fingerprint, "tokenizer_hash": prepared.manifest.tokenizer_hash}
        print_json({"directory": str(prepared.directory), **facts, "splits": splits})
    else:
        say(describe(prepared))


@contextmanager
def stages(hidden: bool) -> Iterator[_Stages]:
    """Bars that last as long as the block, on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:<10}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    hidden = hidden or not sys.stderr.isatty()
    # or bars of libraries, such as datasets' own, would be printed as lines above ours
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stderr=False, disable=hidden) as bar:
        yield _Stages(bar)


class _Stages:
    """One bar for each stage that is reported."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar
        self.tasks: dict[str, Any] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self.tasks:
            self.tasks[stage] = self.bar.add_task(stage, total=total or None)
        self.bar.update(self.tasks[stage], total=total or None, completed=done)


def describe(prepared: Prepared) -> str:
    """Describe what was prepared, in a few lines."""
    manifest = prepared.manifest
    lines = []
    for name, split in manifest.splits.items():
        text = f"{split.text_bytes / 1e6:,.1f} MB of {'answers' if split.packs else 'text'}"
        parts = counted(split.documents, "answer" if split.pairs else "sample" if split.packs else "document")
        lines.append(f"{name:<11} {counted(split.tokens, 'token')} in {parts}{', two per pair' * split.pairs}, {text}")
    for name, split in manifest.splits.items():
        if split.packs is not None and manifest.seq_len:
            share, filled = split.supervised_tokens / split.tokens, split.tokens / (split.windows * manifest.seq_len)
            windows = f"{counted(split.windows, 'window')} of {manifest.seq_len:,}, {filled:.1%} filled"
            lines.append(f"{'':<11} {name}: {split.supervised_tokens:,} supervised tokens ({share:.1%}), {windows}")
    lines += preview.report(manifest.counts)
    if manifest.empty_documents:
        lines.append(f"left out    {counted(manifest.empty_documents, 'empty document')}")
    known = f"{manifest.vocab_size:,} ids, end-of-text {manifest.eot_id}, hash {manifest.tokenizer_hash[:8]}"
    return "\n".join([*lines, f"tokenizer   {known}", f"directory   {prepared.directory}"])


add_command(app, Options, run, "prepare")
add_command(app, preview.Options, preview.run, "preview")
