"""``shardwise plan``: what would run, what it needs, and why, before anything is spent."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from typer import Option

from shardwise.cli.decide import beyond, cluster_of, far, with_measured_experts
from shardwise.cli.imported import Foreign, beside_theirs, given
from shardwise.cli.length import Asked
from shardwise.cli.options import Common, RecipeWords, Words, machine_words, misused, sort_words
from shardwise.cli.out_file import check_file, check_page, write_out, writing
from shardwise.cli.plan_page import NextCommand, page_of, page_of_plan
from shardwise.cli.plan_trace import Trace, beside, read_measured, trace_of, write_trace
from shardwise.cli.planned import (
    Planned,
    as_json,
    change_parts,
    head_lines,
    page_parts,
    plan_parts,
    planned,
    schedule_of,
)
from shardwise.cli.questions import Asking
from shardwise.cli.replies import Questions, Reply, answered
from shardwise.cli.show import note, print_json, say, say_as_known, working
from shardwise.cli.timeline import svg
from shardwise.interop.emit_files import EMITTED, emitted
from shardwise.launch.rundir import check_new
from shardwise.models.resolve import resolve, with_adapter
from shardwise.planner.length import read_prices, read_tokens
from shardwise.planner.search import uncollected
from shardwise.spec.cluster import Cluster, crowding, local_cluster
from shardwise.spec.cluster_file import LOCAL
from shardwise.spec.load import dump_plan, load_plan
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe

TOPICS = ("memory", "network", "time", "schedule", "why", "keys")


@dataclass
class Options(Questions, Foreign, Common):
    """Show how a training run would be split, what it needs, and whether it fits. Nothing is downloaded but a
    config.json.

    Any key of the recipe may follow: --model meta-llama/Llama-3.1-70B --seq-len 4096, or key=value.
    """

    arguments: RecipeWords = field(default_factory=list)
    cluster: Annotated[
        str | None,
        Option("--cluster", help="8 H100, 2x8xL40S+100GbE, 2xCPU, or doctor's cluster.yaml (default: this machine)."),
    ] = None
    plan: Annotated[Path | None, Option("--plan", help="Show this plan without a search.")] = None
    tokens: Annotated[str | None, Option("--tokens", help="How long and how much for so many tokens: 10B.")] = None
    price: Annotated[list[str], Option("--price", help="Dollars a GPU-hour: H100=2.5.")] = field(default_factory=list)
    explain: Annotated[
        str | None,
        Option("--explain", help="More about: memory, network, time, schedule, why, keys (how they were read)."),
    ] = None
    emit: Annotated[
        str | None, Option("--emit", help=f"Print the plan in the terms of {', '.join(EMITTED)}.", metavar="SYSTEM")
    ] = None
    plot: Annotated[Path | None, Option("--plot", help="Draw the schedule of a pipeline into this SVG file.")] = None
    html: Annotated[
        Path | None, Option("--html", help="Write all of it, with charts, into this HTML file.", metavar="FILE")
    ] = None
    trace: Annotated[
        Path | None,
        Option("--trace", help="Write the planned step for Perfetto: FILE.json or .json.gz.", metavar="FILE"),
    ] = None
    beside: Annotated[
        Path | None, Option("--beside", help="In --trace, beside this file that train --profile wrote.", metavar="FILE")
    ] = None
    out: Annotated[Path | None, Option("-o", "--out", "--output", help="Write the chosen plan to this YAML file.")] = (
        None
    )


@uncollected()
def run(options: Options) -> None:
    """Print the plan, or write it."""
    words = sort_words(options.arguments, Options, several=True)
    if told := _answered(words, options):
        return print_json(told.found) if options.json else say(*told.lines)
    if options.explain is not None and options.explain not in TOPICS:
        raise misused(f"nothing to explain about `{options.explain}`", f"one of {', '.join(TOPICS)}", "--explain")
    if options.emit not in (None, *EMITTED):
        raise misused(f"no plan is written for `{options.emit}`", f"one of {', '.join(EMITTED)}", "--emit")
    _check_files(options)
    ran = read_measured(options.beside) if options.beside else None
    if options.plan:
        if rest := [*options.arguments, *filter(None, (options.cluster, options.out, options.tokens, *options.price))]:
            what = f"`--plan` shows that plan unchanged, so `{rest[0]}` has no effect"
            raise misused(what, "leave out one of the two")
        return _print_plan(load_plan(options.plan), options)
    found = given(words, options.cluster, options, data=False)
    loaded, path = found.loaded, found.path
    for notice in loaded.notices if options.explain == "keys" else loaded.shown:
        note(notice, as_json=options.json)
    recipe = with_adapter(loaded.recipe)
    spec, cluster = resolve(recipe), cluster_of(recipe, options.cluster)
    tokens = None if options.tokens is None else read_tokens(options.tokens)
    here = options.cluster in (None, LOCAL)
    asked = Asked(tokens, read_prices(options.price, cluster))
    if here:
        recipe, measured = with_measured_experts(recipe, spec, cluster)
        for notice in filter(None, (crowding(cluster), measured)):
            note(notice, as_json=options.json)
    with working("choosing a plan"):
        answer = planned(recipe, spec, cluster, asked, here=here)
    for warning in filter(None, (far(answer.best, recipe.parallel), beyond(recipe, spec))):
        note(warning, as_json=options.json)
    following = _following(words.files or [*filter(None, [path])], words.overrides, options, cluster)
    _write_files(answer, following, ran, options)
    if options.json:
        return print_json(as_json(answer))
    if options.emit:
        return say(emitted(answer.best, options.emit).rstrip())
    say(*head_lines(answer))
    if found.imported is not None and found.pinned is not None:
        say(*beside_theirs(answer, found.imported, with_adapter(found.pinned.recipe), keys=options.explain == "keys"))
    say_as_known("looking at plans of other kinds", page_parts(answer, options.explain))
    if options.explain == "keys" and found.imported is None:
        say("how keys were read", *(loaded.renamed or ["under their own names"]), "")
    say_as_known("looking for what would change it", change_parts(answer, each=sys.stdout.isatty()))
    say((f"written: {options.out}        " if options.out else "") + "\n".join(map(str, following)))
    return None


def _write_files(answer: Planned, following: list[NextCommand], ran: Trace | None, options: Options) -> None:
    """Write what options name files for, the plan first. Raises OutputError."""
    if options.out:
        check_new(options.out)
        options.out.write_text(dump_plan(answer.chosen), encoding="utf-8")
    if options.plot:
        if answer.best.layout.pp == 1:
            what = "the plan has no pipeline, whose schedule could be drawn"
            raise misused(what, "leave it out, or pin one: parallel.pp=2", "--plot")
        check_new(options.plot, "--plot")
        options.plot.write_text(svg(schedule_of(answer)), encoding="utf-8")
    if options.html:
        with working("drawing the page"):
            write_out(options.html, page_of(answer, following).html(), "--html")
        note(f"written: {options.html}", as_json=options.json)
    if options.trace:
        with working("tracing the step"), writing(options.trace, "--trace"):
            trace = trace_of(answer.spec, answer.best, answer.cluster)
            write_trace(options.trace, beside(ran, trace) if ran else trace)
        note(f"written: {options.trace}", as_json=options.json)


def _check_files(options: Options) -> None:
    """Raises an error where a page or a trace cannot be written, or would be written over what else is."""
    named = {"--html": options.html, "--trace": options.trace, "--plot": options.plot, "--out": options.out}
    paths = {option: path.absolute() for option, path in named.items() if path}
    for option in ("--html", "--trace"):
        if option in paths and [*paths.values()].count(paths[option]) > 1:
            raise misused(f"{named[option]} would be written twice", f"`{option}` another file", option)
    if options.html:
        check_page(options.html, "--html", "plan")
    if options.trace and options.plan:
        what = "a plan's file does not say of what model, so that its step cannot be timed"
        raise misused(what, "the recipe and the cluster in the place of `--plan`", "--trace")
    if options.trace:
        check_file(options.trace, "--trace")
    elif options.beside:
        raise misused("`--beside` adds to a trace that is written", "`--trace FILE` too", "--beside")


def _print_plan(plan: Plan, options: Options) -> None:
    """Print, and draw, a plan that a file has."""
    if options.html:
        write_out(options.html, page_of_plan(plan).html(), "--html")
        note(f"written: {options.html}", as_json=options.json)
    if options.emit:
        return say(emitted(plan, options.emit).rstrip())
    parts = plan_parts(plan, lambda: [plan], lambda: plan, options.explain)
    return print_json(asdict(plan)) if options.json else say(*(line for part in parts for line in part))


def _answered(words: Words, options: Options) -> Reply | None:
    """Return the answer to a question around the plan, if one is asked."""
    told = list[str]()

    def read(more: list[str], machines: str | None) -> Recipe:
        asked = replace(words, overrides=[*words.overrides, *more])
        loaded = given(asked, machines, options, data=False).loaded
        for notice in loaded.shown if not told else ():
            note(notice, as_json=options.json)
        told.append("once")
        return with_adapter(loaded.recipe)

    tokens = None if options.tokens is None else read_tokens(options.tokens)
    of_one = ("plan", "explain", "emit", "plot", "html", "trace", "beside", "out")
    page = [f"--{name}" for name in of_one if vars(options)[name] is not None]
    with working("looking at plans"):
        return answered(options, Asking(read, options.cluster, tokens, options.price), page)


def _following(files: list[Path], overrides: list[str], options: Options, cluster: Cluster) -> list[NextCommand]:
    """Return what to type next."""
    words = asked = [*map(str, files), *overrides]
    if not options.out:
        flags = [("--cluster", options.cluster), ("--tokens", options.tokens), ("--from", options.system)]
        flags += [("--set", word) for word in options.set]
        flags += [*(("--price", p) for p in options.price)]
        given = [word for flag, value in flags if value for word in (flag, value)]
        again = shlex.join(["shardwise", "plan", *words, *given, "-o", "plan.yaml"])
        return [NextCommand("next", again, "more: --explain memory | network | time | schedule | why")]
    there = ""
    if options.cluster:  # the settings replace what the recipe says of machines
        words = [word for word in words if not word.startswith(("run.nproc=", "run.device=", "run.nodes="))]
        words += machine_words(cluster)
        here = local_cluster(None, cluster.kind if cluster.kind == "cpu" else "auto", 1)
        here_too = cluster.nodes == 1 and here.kind == cluster.kind
        there = "" if here_too and (here.kind == "cpu" or here.world >= cluster.world) else f", on {options.cluster}"
    train = shlex.join(["shardwise", "train", *words, "--plan", str(options.out)])
    prove = shlex.join(["shardwise", "prove", *asked, "--plan", str(options.out)])
    return [NextCommand(f"next{there}", train), NextCommand("before that, on any machine", prove)]
