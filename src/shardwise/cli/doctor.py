"""``shardwise doctor``: what this machine is, what it gives, and whether that is what it should give."""

from __future__ import annotations

import shlex
import signal
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from typer import Option

from shardwise.cli import interrupt, step_time
from shardwise.cli.decide import this_machine
from shardwise.cli.kept_rates import keep
from shardwise.cli.options import Common, RecipeWords, recipe_file, sort_words
from shardwise.cli.show import explained, note, print_error, print_json, say
from shardwise.errors import Problem, TrainingError
from shardwise.launch import nodes, rundir, worker
from shardwise.launch.launchers import Ended, Launch, launch
from shardwise.launch.writable import nearest
from shardwise.models.resolve import resolve, with_adapter
from shardwise.planner.search import choose
from shardwise.runtime.faults.outcome import Kind, failed, write_exit
from shardwise.spec.cluster import Cluster, crowding
from shardwise.spec.cluster_file import dump_cluster
from shardwise.spec.explain import label
from shardwise.spec.launchers import launcher_of
from shardwise.spec.load import read_recipe
from shardwise.spec.recipe import Recipe


@dataclass
class Options(Common):
    """Describe and measure this machine, and say what is below what it should give.

    It measures products, attention, memory, the disk, and what ranks send one another, on the ranks that `shardwise
    train` would start, in some 20 seconds. With a recipe it says what a step of it takes here. Keys of a recipe may
    follow (--nproc 4); run.nodes=2 prints how to start it on several machines.
    """

    arguments: RecipeWords = field(default_factory=list)
    out: Annotated[
        Path | None, Option("-o", "--out", "--output", help="Write what was measured to this file, for plan --cluster.")
    ] = None


def run(options: Options) -> int:
    """Start the ranks, or be one; the exit code."""
    worker.die_with_launcher()
    words = sort_words(options.arguments, Options)
    recipe = read_recipe(recipe_file(words.path) if words.path else None, words.overrides).recipe
    again = [str(words.path)] * (words.path is not None) + words.overrides
    if worker.is_worker():
        return _as_rank(options, recipe, again)
    cluster = this_machine(recipe)
    if options.out:
        rundir.check_new(options.out)
    flags = (["-o", str(options.out)] if options.out else []) + ["--json"] * options.json + ["--debug"] * options.debug
    launcher = launcher_of(recipe.run.launcher, cluster.nodes)
    if not launcher.here:
        lines = launch(launcher, Launch(["doctor", *again, *flags], cluster.nodes, cluster.devices_per_node, Path()))
        say(*lines) if isinstance(lines, list) else None
        return 0
    if warning := crowding(cluster):
        note(warning, as_json=options.json)
    note(f"measuring on {cluster.devices_per_node} ranks, about 20 s", as_json=options.json)
    command = ["doctor", *again, f"run.device={cluster.kind}", f"run.nproc={cluster.devices_per_node}", *flags]
    with tempfile.TemporaryDirectory(prefix="shardwise-doctor-") as directory:
        ended = launch(launcher, Launch(command, 1, cluster.devices_per_node, Path(directory), saves=False))
    assert isinstance(ended, Ended)
    return _told(ended, options)


def _told(ended: Ended, options: Options) -> int:
    """Say why ranks failed, if they did."""
    problem = ended.problem
    if ended.exit_code == 128 + signal.SIGINT:
        interrupt.say()
    elif problem is not None:
        fix = problem.fix if problem.code not in ("RUN004", "RUN005") else "`shardwise doctor` again"
        what = problem.what.replace(" before the ranks could save", "")
        shown = TrainingError(Problem(problem.code, what, "" if fix != problem.fix else problem.where, fix))
        if options.json:
            print_json({"error": {"exit_code": ended.exit_code, "problems": [asdict(shown.problems[0])]}})
        else:
            print_error(shown, as_json=False)
    return ended.exit_code


def _as_rank(options: Options, recipe: Recipe, again: list[str]) -> int:
    """Measure as one of several ranks; rank 0 prints. What goes wrong is left where our launcher looks for it."""
    if not worker.by_our_launcher():
        if warning := nodes.exposure():
            note(warning, as_json=options.json)
        return _measure(options, recipe, again)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # there is nothing to save, and the launcher says it
    try:
        return _measure(options, recipe, again)
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        from shardwise.runtime.faults.guard import GONE, SILENT

        shown = explained(error)
        kind: Kind = "peer_lost" if any(mark in str(error) for mark in (*GONE, *SILENT)) else "error"
        write_exit(worker.launcher_directory() or Path(), failed(kind, shown, worker.rank()))
        return shown.exit_code


def _measure(options: Options, recipe: Recipe, again: list[str]) -> int:
    world, each = worker.started()
    sizes = recipe.run.model_copy(update={"nproc": each, "nodes": world // each})
    cluster = this_machine(recipe.model_copy(update={"run": sizes}))  # before this rank takes memory for itself
    if options.out and worker.rank() == 0:
        rundir.check_new(options.out)
    worker.set_up_torch(deterministic=False)
    from shardwise.launch.doctor.machine import describe, machine_lines, obstacles
    from shardwise.launch.doctor.rank_work import measure
    from shardwise.launch.doctor.verdict import as_measured, compare, shortfalls, table

    directory = nearest(Path(recipe.run.out).absolute())
    found = measure(cluster, directory)
    if worker.rank():
        return 0
    machine, lines = describe(directory), list(compare(cluster, found.measured))
    wrong = [*obstacles(machine, cluster), *shortfalls(lines, found)]
    said = f"measured by shardwise doctor on {machine.host}, {time.strftime('%Y-%m-%d %H:%M')}"
    measured = as_measured(cluster, found.measured, said)
    head = said, machine.versions
    if options.out:
        options.out.write_text(dump_cluster(measured, head), encoding="utf-8")
    kept = _kept(measured, head, as_json=options.json)
    named = recipe.model.path is not None or recipe.model.config is not None
    step = _step(recipe, measured) if named else []
    if options.json:
        facts = {"machine": asdict(machine), "cluster": asdict(measured), "wrong": wrong, "step": step}
        print_json(facts | {"compared": [asdict(line) for line in lines]})
        return 0
    say(*machine_lines(machine, cluster), "", *table(lines), "")
    say(*(f"wrong: {text}" for text in wrong or ()), *([] if wrong else ["nothing is below what it should be"]), "")
    say(*step, *[""] * bool(step))
    say(*([f"kept for plans and runs here: {kept}"] if kept else []), _next(again, options, kept))
    return 0


def _kept(measured: Cluster, head: tuple[str, ...], *, as_json: bool) -> Path | None:
    """Keep what was measured for later plans and runs on this machine; None, with a warning, where no file can be
    written."""
    try:
        return keep(measured, head, worker.state_directory())
    except OSError as error:
        note(f"warning[OUT002]: what was measured is not kept for later plans here: {error}", as_json=as_json)
        return None


def _next(again: list[str], options: Options, kept: Path | None) -> str:
    """Tell what to do next: plan for this machine, or for the file, which says how many ranks there are."""
    if kept and not options.out:
        return f"next: {shlex.join(['shardwise', 'plan', *again])}"
    words = [word for word in again if not word.startswith(("run.nproc=", "run.device=", "run.nodes="))]
    plan = shlex.join(["shardwise", "plan", *words, "--cluster", str(options.out or "cluster.yaml")])
    if options.out:
        return f"written: {options.out}        next: {plan}"
    return f"next: {shlex.join(['shardwise', 'doctor', *words, '-o', 'cluster.yaml'])} && {plan}"


def _step(recipe: Recipe, measured: Cluster) -> list[str]:
    """A step of the recipe on what was measured: its plan, what it computes, and what it waits for."""
    asked = with_adapter(recipe)
    spec = resolve(asked)
    plan = choose(asked, spec, measured)
    lines = [f"the recipe here: {label(plan)}", *step_time.step_lines(spec, plan, measured)]
    waits = step_time.bottleneck(plan, measured)
    return [*lines, waits] if waits else lines
