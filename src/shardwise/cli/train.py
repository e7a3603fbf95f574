"""``shardwise train``: plan, check, start the ranks, and end with their exit code; or, inside a rank, train."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from shardwise.cli.imported import Foreign, given
from shardwise.cli.options import Words, sort_words
from shardwise.cli.show import note, outlive_output, print_error, print_json, say
from shardwise.cli.start import How, named, start, stem_of
from shardwise.cli.work import work
from shardwise.errors import PreemptedError, ShardwiseError, TrainingError
from shardwise.launch.launchers import DEFAULT_PORT, Ended
from shardwise.launch.worker import die_with_launcher, is_worker, set_up_torch
from shardwise.spec.load import Loaded, dump_recipe


@dataclass
class Options(Foreign):
    """Train a model. Without a recipe: the quickstart, a small Llama on Python's own sources.

    Any key of the recipe may follow as key=value or --key value (--max-steps 5, --report-to wandb, --profile
    10:12); `shardwise schema --keys` lists them.
    """

    arguments: Annotated[
        list[str], Argument(metavar="[RECIPE.yaml | RUN_DIRECTORY] [key=value ...]", show_default=False)
    ] = field(default_factory=list)
    plan: Annotated[Path | None, Option("--plan", help="Run this plan unchanged, without a search.")] = None
    resume: Annotated[bool, Option("--resume", help="Continue from the newest checkpoint of the run.")] = False
    dry_run: Annotated[bool, Option("--dry-run", help="Plan and check everything, start nothing.")] = False
    print_config: Annotated[bool, Option("--print-config", help="Print the whole recipe and stop.")] = False
    run: Annotated[str | None, Option("--run", help="The run's name: its directory under --out.")] = None
    out: Annotated[str | None, Option("-o", "--out", "--output", help="Directory for runs (default: runs).")] = None
    allow_fresh_start: Annotated[bool, Option("--allow-fresh-start", help="Start over if no checkpoint is intact.")] = (
        False
    )
    json: Annotated[bool, Option("--json", help="Results and errors as JSON.")] = False
    debug: Annotated[bool, Option("--debug", help="Show tracebacks.")] = False
    port: Annotated[
        int, Option("--port", min=1, max=65535, help="Port on the first of several nodes (one machine opens none).")
    ] = DEFAULT_PORT


def run(options: Options) -> int:
    """Do what the options say; the exit code."""
    die_with_launcher()
    outlive_output()
    loaded, how = asked_for(options)
    if options.print_config:
        print_json(loaded.recipe.model_dump(mode="json")) if options.json else say(dump_recipe(loaded.recipe).rstrip())
        return 0
    if is_worker():
        set_up_torch(deterministic=loaded.recipe.run.deterministic)
        done = work(named(loaded.recipe, how), how)
        return done.exit_code if isinstance(done, ShardwiseError) else 0
    for notice in loaded.shown:
        note(notice, as_json=options.json)
    directory, ended = start(loaded.recipe, how)
    return 0 if ended is None else _wait(ended, directory, options)


def asked_for(options: Options) -> tuple[Loaded, How]:
    """Return the recipe, and the settings of the run's start."""
    words = sort_words(options.arguments, Options, several=True)
    if options.resume and words.path is None and options.run:
        words.path = Path(options.out or "runs") / options.run
    loaded = _load(options, words)
    how = How(
        plan=options.plan,
        stem=None if "run.name" in loaded.given else stem_of(words.path, loaded.recipe),
        resume=options.resume,
        dry_run=options.dry_run,
        fresh=options.allow_fresh_start,
        hidden=options.json,
        debug=options.debug,
        port=options.port,
        words=(*map(str, words.files), *words.overrides),
    )
    return loaded, how


def _load(options: Options, words: Words) -> Loaded:
    flags = {"run.name": options.run, "run.out": options.out}
    overrides = words.overrides + [f"{key}={value}" for key, value in flags.items() if value is not None]
    if words.path is not None and os.path.isdir(words.path):
        run = words.path if words.path.name not in ("", "..") else words.path.resolve()  # `.` has another name
        overrides = [f"run.out={run.parent}", f"run.name={run.name}", *overrides]
    found = given(Words(words.path, overrides, words.more), None, options)
    if found.imported is not None:
        words.path = found.path
        for line in found.imported.lines:
            note(line, as_json=options.json)
    return found.loaded


def _wait(ended: Ended, directory: Path, options: Options) -> int:
    problem = ended.problem
    if problem is None:
        if options.json:
            print_json({"run": str(directory), "exit_code": ended.exit_code})
    elif options.json:
        print_json({"error": {"exit_code": ended.exit_code, "problems": [asdict(problem)]}, "run": str(directory)})
    elif ended.exit_code == PreemptedError.exit_code:
        say(f"stopped: {problem.what}\nnext     {problem.fix}")
    else:
        print_error(TrainingError(problem), as_json=False)
    return ended.exit_code
