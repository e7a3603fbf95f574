"""``shardwise plan``: what would run, what it needs, and why, before anything is spent."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from shardwise.cli import render
from shardwise.cli.decide import beyond, cluster_of, far, told
from shardwise.cli.options import Common, machine_words, recipe_or_quickstart, sort_words
from shardwise.cli.show import note, print_json, say
from shardwise.errors import Problem, UsageError
from shardwise.launch.rundir import check_new
from shardwise.models.config import parameter_count
from shardwise.models.hf_spec import NOTICE
from shardwise.models.resolve import resolve, with_adapter
from shardwise.planner.remedy import remedies
from shardwise.planner.search import choose, fits, settings
from shardwise.planner.wire import wire_s
from shardwise.spec.cluster import Cluster, crowding, local_cluster
from shardwise.spec.cluster_file import LOCAL
from shardwise.spec.load import dump_plan, load_plan, read_recipe
from shardwise.spec.plan import Plan

TOPICS = ("memory", "network", "why", "keys")


@dataclass
class Options(Common):
    """Show how a training run would be split, what it needs, and whether it fits. Nothing is downloaded but a
    config.json.

    Any key of the recipe may follow: --model meta-llama/Llama-3.1-70B --seq-len 4096, or key=value.
    """

    arguments: Annotated[list[str], Argument(metavar="[RECIPE.yaml] [key=value ...]", show_default=False)] = field(
        default_factory=list
    )
    cluster: Annotated[
        str | None,
        Option("--cluster", help="8 H100, 2x8xL40S+100GbE, 2xCPU, or doctor's cluster.yaml (default: this machine)."),
    ] = None
    plan: Annotated[Path | None, Option("--plan", help="Show this plan without a search.")] = None
    explain: Annotated[
        str | None, Option("--explain", help="More about: memory, network, why, keys (how the recipe's were read).")
    ] = None
    out: Annotated[Path | None, Option("-o", "--out", "--output", help="Write the chosen plan to this YAML file.")] = (
        None
    )


def run(options: Options) -> None:
    """Print the plan, or write it."""
    if options.explain is not None and options.explain not in TOPICS:
        fix = f"one of {', '.join(TOPICS)}"
        raise UsageError(Problem("CLI001", f"nothing to explain about `{options.explain}`", "--explain", fix))
    if options.plan:
        if rest := [*options.arguments, *filter(None, (options.cluster, options.out))]:
            what = f"`--plan` shows that plan unchanged, so `{rest[0]}` has no effect"
            raise UsageError(Problem("CLI001", what, "the command line", "leave out one of the two"))
        plan = load_plan(options.plan)
        return print_json(asdict(plan)) if options.json else _print_plan([plan], plan, [], options.explain)
    words = sort_words(options.arguments, Options)
    path = recipe_or_quickstart(words.path, words.overrides)
    loaded = read_recipe(path, words.overrides)
    for notice in loaded.notices if options.explain == "keys" else loaded.told:
        note(notice, as_json=options.json)
    recipe = with_adapter(loaded.recipe)
    spec, cluster = resolve(recipe), cluster_of(recipe, options.cluster)
    if options.cluster in (None, LOCAL) and (warning := crowding(cluster)):
        note(warning, as_json=options.json)
    chosen = told(choose(recipe, spec, cluster), recipe)
    plans = settings(recipe, spec, cluster, chosen)
    for warning in filter(None, (far(chosen), beyond(recipe, spec))):
        note(warning, as_json=options.json)
    if options.out:
        check_new(options.out)
        options.out.write_text(dump_plan(chosen), encoding="utf-8")
    changes = [] if fits(chosen) else remedies(recipe, spec, cluster, chosen)
    if options.json:
        model, machines = {"name": spec.name, "parameters": parameter_count(spec)}, asdict(cluster)
        facts = {"model": model, "cluster": {**machines, "name": str(cluster)}, "plan": asdict(chosen)}
        changed = [{"change": found.change, "price": found.price, "plan": asdict(found.plan)} for found in changes]
        return print_json({**facts, "settings": [asdict(plan) for plan in plans], "remedies": changed})
    say(render.title(spec, cluster))
    if spec.hf_model is not None:
        say(f"{spec.family}, {NOTICE}")
    if cluster.assumptions:
        say("assumed: " + "; ".join(cluster.assumptions))
    say()
    busy_s = [wire_s(plan.estimate.traffic, plan.layout, cluster) for plan in plans]
    _print_plan(plans, chosen, busy_s if cluster.world > 1 else [], options.explain)
    if options.explain == "keys":
        say("how keys were read", *(loaded.renamed or ["under their own names"]), "")
    if changes:
        say(*render.remedy_lines(changes, chosen.estimate), "")
    _print_next(path, words.overrides, options, cluster)
    return None


def _print_plan(plans: list[Plan], chosen: Plan, busy_s: list[float], explain: str | None) -> None:
    say(*render.setting_lines(plans, chosen, busy_s), "")
    say(f"chosen: {render.label(chosen)} · {render.execution(chosen)}")
    say(f"        {render.verdict(chosen.estimate)}", "")
    for plan in plans if explain == "memory" else [chosen]:
        say(f"memory of the fullest rank at its peak, {render.label(plan)}", *render.memory_lines(plan.estimate), "")
    for plan in plans if explain == "network" else [chosen]:
        lines = render.traffic_lines(plan.estimate)
        say(f"sent by each rank in a step, {render.label(plan)}" + ("" if lines else ": nothing"), *lines, "")
    decided = {key: reason for key, reason in chosen.why.items() if reason != "pinned"}
    reasons = render.why_lines(chosen if explain == "why" else replace(chosen, why=decided))
    if reasons:
        say("why", *reasons, "")


def _print_next(path: Path | None, overrides: list[str], options: Options, cluster: Cluster) -> None:
    words = [*([str(path)] if path else []), *overrides]
    if not options.out:
        words += ["--cluster", options.cluster] if options.cluster else []
        again = shlex.join(["shardwise", "plan", *words, "-o", "plan.yaml"])
        return say(f"next: {again}        more: --explain memory | network | why")
    there = ""
    if options.cluster:  # the settings replace what the recipe says of machines
        words = [word for word in words if not word.startswith(("run.nproc=", "run.device=", "run.nodes="))]
        words += machine_words(cluster)
        here = local_cluster(None, cluster.kind if cluster.kind == "cpu" else "auto", 1)
        able = cluster.nodes == 1 and here.kind == cluster.kind
        there = "" if able and (here.kind == "cpu" or here.world >= cluster.world) else f", on {options.cluster}"
    train = shlex.join(["shardwise", "train", *words, "--plan", str(options.out)])
    say(f"written: {options.out}        next{there}: {train}")
    return None
