"""``shardwise train``: plan, check, start the ranks, and end with their exit code; or, inside a rank, train."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from shardwise.cli import render
from shardwise.cli.decide import beyond, cluster_of, far, plan_of, slower, suited, with_measured_experts
from shardwise.cli.imported import Foreign, given
from shardwise.cli.length import known_count
from shardwise.cli.lengths import epoch, few_steps, late_validation, many_epochs, validated
from shardwise.cli.options import Words, sort_words
from shardwise.cli.preview import report
from shardwise.cli.show import note, outlive_output, output_to_stderr, print_error, print_json, say
from shardwise.cli.work import work
from shardwise.data.source import taken_and_left_out
from shardwise.data.tasks import check_tasks
from shardwise.data.tokens import check_vocabulary
from shardwise.errors import OutputError, PreemptedError, TrainingError, UnavailableError
from shardwise.launch import local, nodes, rundir
from shardwise.launch.keys import check_wandb
from shardwise.launch.worker import die_with_launcher, is_worker, set_up_torch
from shardwise.models.config import ModelSpec, parameter_count
from shardwise.models.resolve import data_of, resolve, with_adapter
from shardwise.models.rows import adds_tokens
from shardwise.runtime.metrics.trackers import check_installed
from shardwise.runtime.owner import check_free
from shardwise.spec import finetune
from shardwise.spec.cluster import Cluster, crowding
from shardwise.spec.load import Loaded, dump_plan, dump_recipe
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe
from shardwise.spec.units import show_bytes
from shardwise.techniques import lora


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
    ] = nodes.DEFAULT_PORT


def run(options: Options) -> int:
    """Do what the options say; the exit code."""
    die_with_launcher()
    outlive_output()
    words = sort_words(options.arguments, Options, several=True)
    if options.resume and words.path is None and options.run:
        words.path = Path(options.out or "runs") / options.run
    loaded = _load(options, words)
    if options.print_config:
        print_json(loaded.recipe.model_dump(mode="json")) if options.json else say(dump_recipe(loaded.recipe).rstrip())
        return 0
    if is_worker():
        set_up_torch(deterministic=loaded.recipe.run.deterministic)
        recipe = with_adapter(_named(options, words, loaded))
        return work(recipe, options.plan, resume=options.resume, fresh=options.allow_fresh_start, debug=options.debug)
    for notice in loaded.told:
        note(notice, as_json=options.json)
    while True:
        try:
            return _launch(options, with_adapter(_named(options, words, loaded)))
        except OutputError as error:
            if "run.name" in loaded.given or options.resume or error.problems[0].code != "OUT005":
                raise  # else another start took the name meanwhile: the next one


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


def _named(options: Options, words: Words, loaded: Loaded) -> Recipe:
    """The recipe with its run's name: as given, else the recipe file's name with the first free number. Ranks that
    torchrun started must agree on it, so they leave out the number."""
    recipe = loaded.recipe
    name = recipe.run.name
    if "run.name" not in loaded.given:
        stem = words.path.stem if words.path else Path(recipe.model.path or "quickstart").name
        newest = rundir.newest_run(Path(recipe.run.out), stem) if options.resume else None
        name = newest.name if newest else stem if is_worker() else rundir.free_name(Path(recipe.run.out), stem)
    rundir.check_name(name)
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": name})})


def _launch(options: Options, recipe: Recipe) -> int:
    from shardwise.data.prepare import check_sources

    directory = Path(recipe.run.out) / recipe.run.name
    check_free(directory)
    recipe = rundir.as_begun(directory, recipe)
    standing = rundir.check_standing(directory, recipe, resume=options.resume)
    if options.resume and (done := rundir.nothing_to_do(directory, recipe)):
        print_json({"run": str(directory), "exit_code": 0}) if options.json else say(done)
        return 0
    _check_beside(recipe)
    spec, cluster = resolve(recipe), cluster_of(recipe)
    if not options.plan:
        if cluster.measured is not None:
            note(cluster.assumptions[-1], as_json=options.json)
        recipe, told = with_measured_experts(recipe, spec, cluster)
        if told:
            note(told, as_json=options.json)
    plan = plan_of(recipe, spec, cluster, options.plan, None if standing is None else directory)
    planned = None
    if standing is None:
        planned = None if options.plan else partial(plan_of, spec=spec, cluster=cluster, file=None)
        recipe, plan = suited(recipe, plan, known_count(recipe), planned)
    warnings = crowding(cluster), slower(plan, cluster), far(plan, recipe.parallel), beyond(recipe, spec)
    for warning in filter(None, warnings):
        note(warning, as_json=options.json)
    space = _check_disks(directory, recipe, spec, plan)
    if not options.json:
        lines = render.summary(plan)
        for line in [f"model   {render.title(spec, cluster)}", *lines] if options.dry_run else lines[1:]:
            say(line)
    check_sources(recipe.data)
    _check_inputs(recipe, spec, plan, fetch=cluster.nodes == 1 and not options.dry_run)
    if options.dry_run:
        rundir.check_writable(rundir.nearest(directory))
        counts = _read_some(recipe, spec, plan)
        facts = {"run": str(directory), "plan": render.label(plan), "disk_bytes": space, "resume_step": standing}
        read = f"data    {counts['read']:,} samples read, from the beginning of each file"
        said = [*([read] if counts["read"] else []), *report(counts)]
        said.append(f"dry run: nothing was started; checkpoints need {show_bytes(space)} of disk")
        print_json({**facts, "records": counts}) if options.json else say(*said)
        return 0
    with rundir.owned(directory, partial(note, as_json=options.json)) as claim:
        standing = rundir.check_standing(directory, recipe, resume=options.resume)  # that nobody else changes now
        resumes = None if standing is None else rundir.resuming(directory, standing, recipe)
        if cluster.nodes == 1:
            recipe, plan = _prepare(recipe, spec, plan, directory, planned, hidden=options.json)
        words = _write(recipe, plan, cluster, directory if standing is None else directory / "resumed")
        flags = {"--allow-fresh-start": options.allow_fresh_start, "--debug": options.debug}
        flags["--resume"] = options.resume and cluster.nodes > 1  # ranks of torchrun check it themselves
        words += [flag for flag, on in flags.items() if on]
        if cluster.nodes > 1:
            return _print_nodes(words[1:], cluster, options.port)
        if resumes is not None:
            note(resumes, as_json=options.json)
        with output_to_stderr() if options.json else nullcontext():
            ended = local.run_ranks(words, cluster.devices_per_node, directory)
        if not claim.held():  # what stands in exit.json now is the other one's
            ended = local.Ended(OutputError.exit_code, claim.lost())
    return _wait(ended, directory, options)


def _check_beside(recipe: Recipe) -> None:
    """Raise for what a run needs beside its model and data, and is not there: trackers and their keys, tasks."""
    check_installed(recipe)
    check_tasks(recipe)
    check_wandb(recipe)


def _check_disks(directory: Path, recipe: Recipe, spec: ModelSpec, plan: Plan) -> int:
    """Bytes that checkpoints will take; raises OUT003 where they, or what is kept on NVMe, have no room."""
    parameters = parameter_count(spec)
    if plan.lora is not None:  # checkpoints hold what is trained alone
        parameters = sum(prod(shape) for shape in lora.trained(spec, plan.lora).values())
    keep = recipe.checkpoint.save_total_limit + recipe.checkpoint.keep_best
    space = rundir.check_space(directory, parameters, keep, export_bytes=4 * parameters)
    if plan.offload.filed:
        rundir.check_offload(Path(recipe.offload.directory or directory).expanduser(), plan)
    return space


def _read_some(recipe: Recipe, spec: ModelSpec, plan: Plan) -> Counter[str]:
    """Open the data if they are prepared, read the first records of each file as the run will, and count them; nothing
    if the tokenizer's Hub is unreachable."""
    from shardwise.data.epochs import check_size
    from shardwise.data.pack import open_windows
    from shardwise.data.prepare import already_prepared, check_records

    if (prepared := already_prepared(data_of(recipe), recipe.sample_tokens)) is not None:
        check_vocabulary(prepared.manifest.vocab_size, spec.vocab_size)
        windows = open_windows(prepared.train, plan.batch.seq_len, recipe.data.mask_documents)
        check_size(windows, plan.batch.global_batch_size(plan.layout.dp), recipe.data)
    with suppress(UnavailableError):
        return check_records(data_of(recipe), recipe.sample_tokens)
    return Counter()


def _write(recipe: Recipe, plan: Plan, cluster: Cluster, directory: Path) -> list[str]:
    """Write the recipe and the plan for the ranks; returns the arguments that start them."""
    directory.mkdir(exist_ok=True)
    run = recipe.run.model_copy(update={"device": cluster.kind, "nproc": cluster.devices_per_node})
    (directory / "recipe.yaml").write_text(dump_recipe(recipe.model_copy(update={"run": run})), encoding="utf-8")
    (directory / "plan.yaml").write_text(dump_plan(plan), encoding="utf-8")
    return ["train", str(directory / "recipe.yaml"), "--plan", str(directory / "plan.yaml")]


def _print_nodes(words: list[str], cluster: Cluster, port: int) -> int:
    lines = nodes.lines(cluster.nodes, cluster.devices_per_node, words, port)
    say(f"\n{cluster.nodes} nodes: run one of these lines on each; all must see this directory and the recipe's data.")
    say("FIRST_NODE is the first node's address in the network between them, INTERFACE the name of its interface there")
    say(f"(`ip route get $FIRST_NODE`). Keep strangers away from port {port} of the first node: docs/security.md\n")
    say(*(f"  {line}" for line in lines))
    return 0


def _check_inputs(recipe: Recipe, spec: ModelSpec, plan: Plan, *, fetch: bool) -> None:
    """Check that tokenizer, weights and adapter fit the model. Unless ``fetch``, weights on the Hub are not downloaded,
    and an unreachable Hub is not an error."""
    from shardwise.data.prepare import open_tokenizer

    model = recipe.model
    with suppress(*() if fetch else (UnavailableError,)):
        if (tokenizer := open_tokenizer(data_of(recipe))) is not None:
            check_vocabulary(tokenizer.vocab_size, spec.vocab_size)
    if model.path is not None and model.init != "random" and (fetch or os.path.exists(model.path)):
        from shardwise.models.hf import check_weights  # with torch, which takes as long as all else here

        check_weights(model.path, model.revision, spec, grown=adds_tokens(recipe.data))
    if recipe.lora.path is not None and plan.lora is not None:
        from shardwise.models.peft import find_adapter

        find_adapter(Path(recipe.lora.path), lora.trained(spec, plan.lora), plan.lora, spec)


def _prepare(
    recipe: Recipe,
    spec: ModelSpec,
    plan: Plan,
    directory: Path,
    planned: Callable[[Recipe], Plan] | None,
    *,
    hidden: bool,
) -> tuple[Recipe, Plan]:
    """Tokenise before the ranks are started: if rank 0 did it, the others would time out. Returns the recipe with the
    length, and both with the batch (``planned`` again, unless None), that suit the data, where the recipe sets none."""
    from shardwise.cli.data import stages
    from shardwise.data.epochs import check_held_out, check_size, interval, max_steps, samples_of_epochs, settled
    from shardwise.data.pack import open_windows
    from shardwise.data.portions import open_data

    with stages(hidden) as said:
        prepared, _ = open_data(recipe, data_of(recipe), directory / "stream", first=True, progress=said)
    check_vocabulary(prepared.manifest.vocab_size, spec.vocab_size)
    windows = open_windows(prepared.train, plan.batch.seq_len, recipe.data.mask_documents)
    first = plan
    if planned is not None:
        recipe, plan = suited(recipe, plan, len(windows), planned)
    batch = plan.batch.global_batch_size(plan.layout.dp)
    check_size(windows, batch, recipe.data)
    unheld, recipe = check_held_out(recipe, prepared), settled(recipe, windows)
    if hidden or recipe.data.streaming:  # the length of an epoch of streamed text is not known
        return recipe, plan
    if batch != first.batch.global_batch_size(first.layout.dp):
        say(f"batch   {batch:,}: {finetune.why_batch(len(windows))}", *render.summary(plan)[1:])
    total = max_steps(recipe, windows, batch)
    read = min(total * batch, samples_of_epochs(windows, recipe.train.num_epochs) or total * batch)
    every = interval(recipe.evaluate.eval_steps, recipe.evaluate.evals_per_epoch, windows, batch)
    held_out = validated(recipe, prepared, every, total)
    files = taken_and_left_out(recipe.data.path, recipe.sample_tokens is not None)
    say(
        epoch(windows, batch, total, read),
        *(f"        {line}" for line in files),
        *held_out,
        *report(prepared.manifest.counts),
    )
    few = few_steps(windows, batch, plan.layout.dp, total, recipe.train)
    late = late_validation(recipe, every, total) if held_out else unheld
    for warning in filter(None, (few, many_epochs(windows, read), late)):
        note(warning)
    return recipe, plan


def _wait(ended: local.Ended, directory: Path, options: Options) -> int:
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
