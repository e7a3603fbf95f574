"""``shardwise launch``: the job that runs a recipe on several machines, printed or submitted."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from typer import Option

from shardwise import __version__
from shardwise.cli import render
from shardwise.cli.decide import beyond, cluster_of, far, plan_of
from shardwise.cli.imported import MACHINES, Foreign, GivenRecipe, given
from shardwise.cli.job_kind import More, On, kind_of_job, words_of
from shardwise.cli.options import RecipeWords, Words, machine_words, sort_words
from shardwise.cli.show import note, say
from shardwise.cli.start import How, named, stem_of
from shardwise.data.remote import shown
from shardwise.launch.jobs import client
from shardwise.launch.jobs.cluster_job import ClusterJob
from shardwise.launch.launchers import DEFAULT_PORT
from shardwise.models.config import ModelSpec
from shardwise.models.resolve import resolve
from shardwise.spec.cluster import Cluster
from shardwise.spec.emit import emit
from shardwise.spec.explain import label
from shardwise.spec.load import dump_plan, load_plan
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe

NAMED = ("run.name=", "run.out=")


@dataclass
class Options(Foreign):
    """Print or submit the job that trains a recipe on several machines: Slurm, Kubernetes, Ray and others.

    With --submit it is submitted. The job asks for the machines of the plan, and its comments say what it needs. Any
    key of the recipe may follow as key=value or --key value.
    """

    arguments: RecipeWords = field(default_factory=list)
    on: On = None
    submit: Annotated[bool, Option("--submit", help="Submit it by the scheduler's own program.")] = False
    more: More = ""
    cluster: Annotated[
        str | None, Option("--cluster", help="The machines: 4x8xH100 (default: as many like this one as run.nodes).")
    ] = None
    plan: Annotated[Path | None, Option("--plan", help="Run this plan unchanged, without a search.")] = None
    run: Annotated[str | None, Option("--run", help="The run's name: its directory under --out.")] = None
    out: Annotated[str | None, Option("-o", "--out", "--output", help="Directory for runs (default: runs).")] = None
    image: Annotated[str, Option("--image", help="The container's image, where the job names one.")] = (
        f"shardwise:{__version__}"
    )
    port: Annotated[int, Option("--port", min=1, max=65535, help="Port on the first node.")] = DEFAULT_PORT
    debug: Annotated[bool, Option("--debug", help="Show tracebacks.")] = False


def run(options: Options) -> None:
    """Plan, then print the job, or submit it."""
    kind, more = kind_of_job(options.on), words_of(options.more)
    words = sort_words(options.arguments, Options, several=True)
    found = given(_with_names(words, options), options.cluster, options)
    for notice in found.loaded.shown:
        note(notice)
    recipe = found.loaded.recipe
    recipe = named(recipe, How(stem=None if "run.name" in found.loaded.given else stem_of(words.path, recipe)))
    spec, cluster = resolve(recipe), cluster_of(recipe, options.cluster)
    plan = plan_of(recipe, spec, cluster, options.plan)
    for warning in filter(None, (far(plan, recipe.parallel), beyond(recipe, spec))):
        note(warning)
    for line in render.summary(plan)[:2]:
        note(line)
    job = _job(options, words, found, (recipe, spec, cluster, plan))
    text = kind.text(job)
    if shown(text) != text:
        note("warning: the job has a URL with a password or a query, which may be secret")
    if not options.submit:
        return say(text.rstrip("\n"))
    number = client.submit(kind.client, job, text, more)
    on, out = ["--on", kind.name], [job.out] * (job.out != "runs")
    again = [f"--with={options.more}"] if "{more}" in kind.client.listed and more else []
    there = [job.name, *on, *(["--out", *out] if out else []), *again]
    return say(
        f"submitted: job {number} of {kind.name}, run {job.name}",
        f"state    {shlex.join(['shardwise', 'runs', *out, *on, *again])}",
        f"output   {shlex.join(['shardwise', 'logs', *there, '--follow'])}",
        f"end      {shlex.join(['shardwise', 'stop', *there])}",
    )


def _with_names(words: Words, options: Options) -> Words:
    """The words with the run's place: what the options say, or where the directory is that is named for a recipe."""
    place = {"run.name": options.run, "run.out": options.out}
    if words.path is not None and os.path.isdir(words.path):
        run = words.path.resolve() if words.path.name in ("", "..") else words.path
        place = {"run.name": options.run or run.name, "run.out": options.out or str(run.parent)}
    asked = [f"{key}={value}" for key, value in place.items() if value is not None]
    return Words(words.path, [*words.overrides, *asked], words.more)


def _job(
    options: Options, words: Words, found: GivenRecipe, planned: tuple[Recipe, ModelSpec, Cluster, Plan]
) -> ClusterJob:
    """The job; what names machines or the run on the command line gives way to what was found of them."""
    recipe, spec, cluster, plan = planned
    place = [f"--run={recipe.run.name}", f"--out={recipe.run.out}"]
    machines = {"device": cluster.kind, "nproc": cluster.devices_per_node, "nodes": cluster.nodes}
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update=machines)})
    named_here = [str(path) for path in words.files] or ([] if found.path is None else ["quickstart"])
    overrides = [word for word in words.overrides if not word.startswith((*MACHINES, *NAMED))]
    theirs = [f"--from={options.system}"] if options.system else []
    theirs += [f"--set={variable}" for variable in options.set] + ["--strict"] * options.strict
    files = {"recipe.yaml": emit(recipe.model_dump(mode="python", exclude_unset=True), lambda path, value: "")}
    if options.plan is not None:
        theirs.append(f"--plan={options.plan}")
        files["plan.yaml"] = dump_plan(load_plan(options.plan))
    return ClusterJob(
        name=recipe.run.name,
        title=f"{render.title(spec, cluster)}: {label(plan)}",
        words=["train", *named_here, *overrides, *theirs, *machine_words(cluster), *place],
        out=recipe.run.out,
        files=files,
        nodes=cluster.nodes,
        nproc=cluster.devices_per_node,
        device=cluster.device.name,
        gpus=cluster.kind == "cuda",
        directory=Path.cwd(),
        port=options.port,
        image=options.image,
        stays=recipe.run.on_loss != "stop",
    )
