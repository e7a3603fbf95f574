"""``shardwise prove``: a certificate of a recipe and its layout, before anything is spent on GPUs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from shardwise.cli.decide import cluster_of, plan_of, suited
from shardwise.cli.imported import Foreign, given
from shardwise.cli.length import known_count
from shardwise.cli.options import Common, RecipeWords, misused, sort_words
from shardwise.cli.render import title
from shardwise.cli.show import coloured, note, print_json, say, write_out
from shardwise.launch.rundir import check_writable
from shardwise.models.resolve import resolve, with_adapter
from shardwise.prove.pool import RankPool
from shardwise.spec.explain import label
from shardwise.spec.host import available_memory_bytes
from shardwise.spec.load import load_plan
from shardwise.spec.recipe import Run
from shardwise.spec.units import show_seconds

if TYPE_CHECKING:
    from shardwise.prove.certify import Check, Effort

RANK_BYTES = 300 * 2**20
"""Of memory, that a CPU rank needs with torch loaded."""
MOST_RANKS = 16


@dataclass
class Options(Foreign, Common):
    """Prove a recipe and its layout on this machine, without GPUs, and write a certificate.

    What its ranks send and hold is compared with the plan at its own size, in a fake world; what they compute, with one
    process, on CPU ranks at a small size; gradients, with differences of the loss; a checkpoint is loaded under another
    layout. Exit code 1 if anything differs.
    """

    arguments: RecipeWords = field(default_factory=list)
    cluster: Annotated[
        str | None,
        Option("--cluster", help="The machines of the plan: 8xH100, 2x8xH100+400Gb, 2xCPU (default: this machine)."),
    ] = None
    plan: Annotated[Path | None, Option("--plan", help="Prove this plan of the recipe.")] = None
    quick: Annotated[bool, Option("--quick", help="The first and the last rank, and no step in the plan's dtypes.")] = (
        False
    )
    thorough: Annotated[bool, Option("--thorough", help="Drift on all ranks, parity on up to 4 along each axis.")] = (
        False
    )
    out: Annotated[Path | None, Option("-o", "--out", help="Where to write (default: certificates/NAME-PLAN).")] = None


def run(options: Options) -> int:
    """Prove, print, and write the certificate."""
    if options.quick and options.thorough:
        raise misused("--quick and --thorough are opposites", "one of them")
    words = sort_words(options.arguments, Options, several=True)
    planned_for = load_plan(options.plan).cluster or None if options.plan else None
    of = given(words, options.cluster or planned_for, options)
    path, recipe = of.path, with_adapter(of.loaded.recipe)
    spec, cluster = resolve(recipe), cluster_of(recipe, options.cluster or planned_for)
    plan = plan_of(recipe, spec, cluster, options.plan)
    planned = None if options.plan else partial(plan_of, spec=spec, cluster=cluster, given=None)
    recipe, plan = suited(recipe, plan, known_count(recipe), planned)

    from shardwise.prove import certificate, certify

    named = recipe.run.name if recipe.run.name != Run().name else path.stem if path else spec.name
    directory = options.out or Path("certificates") / f"{named}-{certificate.plan_digest(plan)[:8]}"
    check_writable(directory.absolute())
    for line in (title(spec, cluster), f"proving {label(plan)}"):
        note(line, as_json=options.json)
    ranks = max(1, min(MOST_RANKS, available_memory_bytes() // RANK_BYTES))
    effort: Effort = "quick" if options.quick else "thorough" if options.thorough else "normal"
    begun, subject = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", certify.subject_of(recipe, spec, plan, ranks, effort)
    with RankPool(subject.ranks) as pool, _bar(hidden=options.json) as tell:
        checks, smallest = certify.certify(subject, effort, pool, tell, _shown(hidden=options.json))
    asked = [str(file) for file in words.files] or ["quickstart"] * (path is not None)
    machines = title(spec, cluster).partition(" on ")[2]
    facts = certificate.Facts(" ".join([*asked, *words.overrides]), machines, label(plan), effort, begun)
    found = certificate.Certificate(subject, facts, checks, smallest)
    document = found.as_json()
    write_out(directory / "certificate.md", found.markdown(), "--out")
    write_out(directory / "certificate.json", json.dumps(document, indent=1), "--out")
    if options.json:
        print_json(document)
    else:
        unseen = ["not shown:", *(f"  {line}" for line in found.unseen())]
        say("", *found.failures(), *unseen, "", f"{found.verdict}; written: {directory / 'certificate.md'} and .json")
    return 0 if found.holds else 1


def _shown(*, hidden: bool) -> Callable[[Check], None]:
    """A line for each proof."""
    from shardwise.prove.certificate import result

    def show(check: Check) -> None:
        mark = coloured("fails", "red") if check.problems else coloured("holds", "green")
        say(f"{check.proof:<11}  {mark}  {check.case}: {result(check)}  [{show_seconds(check.seconds)}]")

    return (lambda check: None) if hidden else show


@contextmanager
def _bar(*, hidden: bool) -> Iterator[Callable[[str, int, int], None]]:
    """On a terminal, what is being proved and how much is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    hidden = hidden or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as shown:
        task = shown.add_task("", total=None)
        yield lambda what, done, total: shown.update(task, description=what, completed=done, total=total)
