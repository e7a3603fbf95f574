"""``shardwise prove``: a certificate of a recipe and its layout, before anything is spent on GPUs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from shardwise.cli.certified import DIRECTORY, BesideHere, rests_on
from shardwise.cli.decide import cluster_of, plan_of, suited, with_measured_experts
from shardwise.cli.imported import Foreign, given
from shardwise.cli.length import known_count
from shardwise.cli.options import Common, RecipeWords, misused, sort_words
from shardwise.cli.out_file import write_out
from shardwise.cli.render import title
from shardwise.cli.show import coloured, note, print_json, say
from shardwise.data.remote import all_shown
from shardwise.errors import ShardwiseError
from shardwise.launch.writable import check_writable
from shardwise.models.config import ModelSpec
from shardwise.models.resolve import resolve, with_adapter
from shardwise.prove.basis import plan_digest
from shardwise.prove.kept import FILE, Command, read_kept
from shardwise.prove.pool import RankPool
from shardwise.spec import finetune
from shardwise.spec.cluster import Cluster
from shardwise.spec.explain import label
from shardwise.spec.host import available_memory_bytes
from shardwise.spec.load import load_plan
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe, Run
from shardwise.spec.units import show_seconds

if TYPE_CHECKING:
    from shardwise.prove.certify import Check, Effort

RANK_BYTES = 300 * 2**20
"""Of memory, that a CPU rank needs with torch loaded."""
MOST_RANKS = 16
COLOURS = {"fails": "red", "holds": "green"}


@dataclass
class Options(Foreign, Common):
    """Prove a recipe and its layout on this machine, without GPUs, and write a certificate.

    What its ranks send and hold is compared with the plan at its own size, in a fake world, and what they read with the
    data; what they compute, with one process, on CPU ranks at a small size, and the model with transformers' own;
    gradients, with differences of the loss; a checkpoint is loaded under another layout. Exit code 1 if anything
    differs; of --check, if the certificate does not hold, or is of something else.
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
    check: Annotated[
        Path | None,
        Option("--check", help="Read this certificate, or its directory, back: what it shows, and of what it is."),
    ] = None
    out: Annotated[Path | None, Option("-o", "--out", help="Where to write (default: certificates/NAME-PLAN).")] = None


@dataclass(frozen=True)
class ToProve:
    """The subject of the command line, settled as a run would settle it, and the name of its certificate."""

    command: Command
    recipe: Recipe
    spec: ModelSpec
    cluster: Cluster
    plan: Plan
    name: str


def run(options: Options) -> int:
    """Prove, print, and write the certificate; or read one back."""
    if options.quick and options.thorough:
        raise misused("--quick and --thorough are opposites", "one of them")
    if options.check is not None:
        return _check(options, options.check)
    of = _asked(options, prepare=True)
    spec = of.spec
    cluster = of.cluster
    plan = of.plan

    from shardwise.prove import certificate, certify

    directory = options.out or DIRECTORY / f"{of.name}-{plan_digest(plan)[:8]}"
    check_writable(directory.absolute())
    for line in (title(spec, cluster), f"proving {label(plan)}"):
        note(line, as_json=options.json)
    ranks = max(1, min(MOST_RANKS, available_memory_bytes() // RANK_BYTES))
    effort: Effort = "quick" if options.quick else "thorough" if options.thorough else "normal"
    begun = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    subject, basis = certify.subject_of(of.recipe, spec, plan, ranks, effort), rests_on(of.recipe, spec, plan)
    with RankPool(subject.ranks) as pool, _bar(hidden=options.json) as tell:
        checks, smallest = certify.certify(subject, effort, pool, tell, _shown(hidden=options.json))
    machines = title(spec, cluster).partition(" on ")[2]
    facts = certificate.Facts(" ".join(of.command.words), machines, label(plan), effort, begun, of.command, basis)
    found = certificate.Certificate(subject, facts, checks, smallest)
    document = found.as_json()
    write_out(directory / "certificate.md", found.markdown(), "--out")
    write_out(directory / FILE, json.dumps(document, indent=1), "--out")
    if options.json:
        print_json(document)
    else:
        unseen = ["not shown:", *(f"  {line}" for line in found.unseen())]
        say("", *found.failures(), *unseen, "", f"{found.verdict}; written: {directory / 'certificate.md'} and .json")
    return 0 if found.holds else 1


def _asked(options: Options, *, prepare: bool = False) -> ToProve:
    """Return what is to be proved, as a run would settle it. Where the batch follows from data that are few, these are
    prepared first, if told."""
    words = sort_words(options.arguments, Options, several=True)
    planned_for = load_plan(options.plan).cluster or None if options.plan else None
    machines = options.cluster or planned_for
    of = given(words, machines, options)
    recipe = with_adapter(of.loaded.recipe)
    spec, cluster = resolve(recipe), cluster_of(recipe, machines)
    if prepare and finetune.batch_is_open(recipe):
        from shardwise.prove.workload import prepared_of

        with suppress(ShardwiseError):  # the certificate says why the rows are not its own
            prepared_of(recipe)
    if not machines and not options.plan:
        recipe, _ = with_measured_experts(recipe, spec, cluster)
    plan = plan_of(recipe, spec, cluster, options.plan)
    planned = None if options.plan else partial(plan_of, spec=spec, cluster=cluster, given=None)
    recipe, plan = suited(recipe, plan, known_count(recipe), planned)
    named, path = recipe.run.name, of.path
    files = [str(file) for file in words.files] or ["quickstart"] * (path is not None)
    file = None if options.plan is None else str(options.plan)
    said, variables = all_shown([*files, *words.overrides]), all_shown(options.set)
    command = Command(said, options.cluster, file, options.system, variables)
    name = named if named != Run().name else path.stem if path else spec.name
    return ToProve(command, recipe, spec, cluster, plan, name)


def _check(options: Options, path: Path) -> int:
    """Compare a certificate with what the command line names, or else with what it was of."""
    file, kept = read_kept(path)
    of = kept.command
    asked = replace(options, cluster=options.cluster or of.cluster)
    if not options.arguments:
        plan = options.plan or (None if of.plan is None else Path(of.plan))
        asked = replace(asked, arguments=of.words, plan=plan, system=of.system, set=of.set)
    found = _asked(asked)
    answer = BesideHere(file, kept, rests_on(found.recipe, found.spec, found.plan))
    print_json(answer.as_json()) if options.json else say(*answer.lines())
    return 0 if answer.good else 1


def _shown(*, hidden: bool) -> Callable[[Check], None]:
    """A line for each proof."""
    from shardwise.prove.certificate import mark, result

    def show(check: Check) -> None:
        word = coloured(found, COLOURS[found]) if (found := mark(check)) in COLOURS else found
        say(f"{check.proof:<11}  {word}  {check.case}: {result(check)}  [{show_seconds(check.seconds)}]")

    return (lambda check: None) if hidden else show


@contextmanager
def _bar(*, hidden: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Show on a terminal what is being proved and how much is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    hidden = hidden or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as shown:
        task = shown.add_task("", total=None)
        yield lambda what, done, total: shown.update(task, description=what, completed=done, total=total)
