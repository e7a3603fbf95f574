"""A run, from recipe and plan to ranks that have ended: everything is checked and prepared, then they are started."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from signal import Signals

from shardwise.cli import render
from shardwise.cli.certified import told_of_run
from shardwise.cli.decide import beyond, cluster_of, far, plan_of, slower, suited, with_measured_experts
from shardwise.cli.length import known_count
from shardwise.cli.lengths import epoch, few_steps, late_validation, many_epochs, validated
from shardwise.cli.preview import report
from shardwise.cli.replan import ONCE, RunPlan, check_on_loss, kept_plan, next_by_memory, not_again, record
from shardwise.cli.show import note, output_to_stderr, print_json, say
from shardwise.data.source import taken_and_left_out
from shardwise.data.tasks import check_tasks
from shardwise.data.tokens import check_vocabulary
from shardwise.errors import OutputError, PreemptedError, Problem, UnavailableError
from shardwise.launch import rundir
from shardwise.launch.launchers import DEFAULT_PORT, Ended, Launch, launch
from shardwise.launch.service_keys import check_wandb
from shardwise.launch.worker import is_worker
from shardwise.launch.writable import check_writable, nearest
from shardwise.models.added_rows import adds_tokens
from shardwise.models.config import ModelSpec, parameter_count
from shardwise.models.resolve import data_of, resolve, with_adapter
from shardwise.runtime.checkpoint.manifest import train_again
from shardwise.runtime.faults.signals import received
from shardwise.runtime.metrics.trackers import check_installed
from shardwise.runtime.owner import Claim, check_free
from shardwise.spec import finetune
from shardwise.spec.cluster import Cluster, crowding
from shardwise.spec.explain import label
from shardwise.spec.launchers import launcher_of
from shardwise.spec.load import dump_plan, dump_recipe
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe
from shardwise.spec.records import LauncherSpec
from shardwise.spec.units import show_bytes
from shardwise.techniques import lora


@dataclass(frozen=True)
class How:
    """The settings of a run's start. ``plan``, or its file, runs unchanged, without a search. ``stem``: the recipe
    names no run, so that its name is this with the first free number. ``fresh``: it may start over where no checkpoint
    is intact. ``hidden``: nothing but errors is told, and results as JSON. ``words``: files and settings of the command
    line."""

    plan: Plan | Path | None = None
    stem: str | None = None
    resume: bool = False
    dry_run: bool = False
    fresh: bool = False
    hidden: bool = False
    debug: bool = False
    port: int = DEFAULT_PORT
    words: tuple[str, ...] = ()


def stem_of(path: Path | None, recipe: Recipe) -> str:
    """Return what the run's name begins with, where none is given: the recipe's file, or the model's name."""
    return path.stem if path else Path(recipe.model.path or "quickstart").name


def named(recipe: Recipe, how: How, *, several: bool = False) -> Recipe:
    """The recipe with its run's name, and with the settings of the adapter that it begins from. Ranks that torchrun
    started must agree on the name, and so must ``several`` nodes: they leave out the number. Raises OutputError
    (OUT006)."""
    name, out = recipe.run.name, Path(recipe.run.out)
    if how.stem is not None:
        newest = rundir.newest_run(out, how.stem) if how.resume else None
        name = newest.name if newest else how.stem if several or is_worker() else rundir.free_name(out, how.stem)
    rundir.check_name(name)
    return with_adapter(recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": name})}))


def start(recipe: Recipe, how: How) -> tuple[Path, Ended | None]:
    """Return the run's directory, and how the ranks ended; None where none was to be started, and what there is to do
    was told. Raises ShardwiseError for what keeps it from starting."""
    while True:
        asked = named(recipe, how)
        directory = Path(asked.run.out) / asked.run.name
        try:
            return directory, _start(asked, directory, how)
        except OutputError as error:
            if how.stem is None or how.resume or error.problems[0].code != "OUT005":
                raise  # else another start took the name meanwhile: the next one


def _start(recipe: Recipe, directory: Path, how: How) -> Ended | None:
    check_free(directory)
    if not how.dry_run:
        check_on_loss(recipe, "the ranks of one launcher" if recipe.run.nodes == 1 else "started by hand")
    recipe = rundir.as_begun(directory, recipe)
    standing = rundir.check_standing(directory, recipe, resume=how.resume)
    if how.resume and (done := rundir.nothing_to_do(directory, recipe)):
        say(done) if not how.hidden else None
        return Ended(0)
    _check_beside(recipe)
    spec, cluster = resolve(recipe), cluster_of(recipe)
    launcher = launcher_of(recipe.run.launcher, cluster.nodes)
    if not how.plan:
        if cluster.measured is not None:
            note(cluster.assumptions[-1], as_json=how.hidden)
        recipe, measured = with_measured_experts(recipe, spec, cluster)
        if measured:
            note(measured, as_json=how.hidden)
    kept = None if standing is None or how.plan else kept_plan(directory, recipe, spec, cluster)
    if kept:
        note(f"memory: {directory} ran out of it before, and goes on with the plan of then", as_json=how.hidden)
    plan = kept or plan_of(recipe, spec, cluster, how.plan, None if standing is None else directory)
    planned = None
    if standing is None:
        planned = None if how.plan else partial(plan_of, spec=spec, cluster=cluster, given=None)
        recipe, plan = suited(recipe, plan, known_count(recipe), planned)
    warnings = crowding(cluster), slower(plan, cluster), far(plan, recipe.parallel), beyond(recipe, spec)
    for warning in filter(None, warnings):
        note(warning, as_json=how.hidden)
    space = _check_disks(directory, recipe, spec, plan)
    if not how.hidden:
        lines = render.summary(plan)
        for line in [f"model   {render.title(spec, cluster)}", *lines] if how.dry_run else lines[1:]:
            say(line)
    _check_inputs(recipe, spec, plan, fetch=launcher.here and not how.dry_run)
    if how.dry_run:
        _tell_certificate(recipe, spec, plan, how)
        _tell_dry_run(recipe, spec, plan, {"disk_bytes": space, "resume_step": standing}, how)
        return None
    with rundir.owned(directory, partial(note, as_json=how.hidden)) as claim:
        standing = rundir.check_standing(directory, recipe, resume=how.resume)  # that nobody else changes now
        resumes = None if standing is None else rundir.resuming(directory, standing, recipe)
        if launcher.here:
            recipe, plan = _prepare(recipe, spec, plan, directory, planned, hidden=how.hidden)
        _tell_certificate(recipe, spec, plan, how)
        if resumes is not None and launcher.here:
            note(resumes, as_json=how.hidden)
        barred = "the plan was given, with --plan" if how.plan is not None else ONCE if kept else ""
        answer = _until_it_fits(RunPlan(recipe, spec, cluster, plan), launcher, directory, how, claim, barred)
        if isinstance(answer, list):
            say(*answer)
            return None
        if not claim.held():  # what stands in exit.json now is the other one's
            answer = Ended(OutputError.exit_code, claim.lost())
    return answer


def _until_it_fits(
    attempt: RunPlan, launcher: LauncherSpec, directory: Path, how: How, claim: Claim, barred: str
) -> Ended | list[str]:
    """Start the ranks, and where they run out of memory once more with the next plan by memory, if there is one, and it
    is not ``barred`` for a reason."""
    asked = list[int]()
    while True:
        answer = _start_ranks(attempt, launcher, directory, how)
        if isinstance(answer, list) or not answer.ran_out or not claim.held():
            return answer
        if attempt.recipe.run.on_oom == "stop":
            return answer
        with received(lambda number, _: asked.append(number)):  # a scheduler may ask while no rank is there to hear it
            found = next_by_memory(answer, attempt, barred)
            if isinstance(found, RunPlan):
                found = _recorded(answer, attempt, found, directory, how)
        if isinstance(found, Ended):
            return found
        if asked:
            return _stopped(Signals(asked[0]), directory)
        attempt, barred = found, ONCE


def _recorded(answer: Ended, old: RunPlan, new: RunPlan, directory: Path, how: How) -> RunPlan | Ended:
    """Return the new plan, told and written, or the end of the ranks where it cannot be written."""
    try:
        note(record(answer, old, new, directory), as_json=how.hidden)
    except OSError as error:
        return not_again(answer, f"{error.strerror or error}: {error.filename or directory}")
    if not how.hidden:
        say(*render.summary(new.plan)[1:])
    return new


def _stopped(by: Signals, directory: Path) -> Ended:
    """Return the end of a run that was asked to stop after its ranks had ended, with what was saved before."""
    saved = rundir.newest_step(directory) is not None
    what = f"{by.name} came while the run was planned again"
    code, problem = (PreemptedError.exit_code, "STOP001") if saved else (128 + by, "RUN005")
    return Ended(code, Problem(problem, what, str(directory), train_again(directory)))


def _start_ranks(attempt: RunPlan, launcher: LauncherSpec, directory: Path, how: How) -> Ended | list[str]:
    recipe, cluster, begun = attempt.recipe, attempt.cluster, rundir.newest_step(directory) is not None
    words = _write(recipe, attempt.plan, cluster, directory / "resumed" if begun else directory)
    flags = {"--allow-fresh-start": how.fresh, "--debug": how.debug}
    flags["--resume"] = how.resume and not launcher.here  # ranks that others start check it themselves
    words += [flag for flag, on in flags.items() if on]
    with output_to_stderr() if how.hidden else nullcontext():
        gpus = cluster.kind == "cuda"
        return launch(launcher, Launch(words, cluster.nodes, cluster.devices_per_node, directory, how.port, gpus))


def _tell_certificate(recipe: Recipe, spec: ModelSpec, plan: Plan, how: How) -> None:
    """Tell of the certificate that lies here, if one does; raises CERT001 where one is required and none is good."""
    words = [*how.words, *(["--plan", str(how.plan)] if isinstance(how.plan, Path) else [])]
    names = [name for name in (how.stem, recipe.run.name) if name is not None]
    line = told_of_run(recipe, spec, plan, names, shlex.join(["shardwise", "prove", *words]))
    if line is not None and not how.hidden:
        say(line)


def _tell_dry_run(recipe: Recipe, spec: ModelSpec, plan: Plan, facts: dict[str, int | None], how: How) -> None:
    """Tell what a dry run found; raises what would keep the run from writing, or from reading its data."""
    directory = Path(recipe.run.out) / recipe.run.name
    check_writable(nearest(directory))
    counts = _read_some(recipe, spec, plan)
    read = f"data    {counts['read']:,} samples read, from the beginning of each file"
    said = [*([read] if counts["read"] else []), *report(counts)]
    said.append(f"dry run: nothing was started; checkpoints need {show_bytes(facts['disk_bytes'] or 0)} of disk")
    summary = {"run": str(directory), "plan": label(plan), **facts, "records": counts}
    print_json(summary) if how.hidden else say(*said)


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


def _check_inputs(recipe: Recipe, spec: ModelSpec, plan: Plan, *, fetch: bool) -> None:
    """Check that data are there, and that tokenizer, weights and adapter fit the model. Unless ``fetch``, weights on
    the Hub are not downloaded, and an unreachable Hub is not an error."""
    from shardwise.data.prepare import check_sources, open_tokenizer

    check_sources(recipe.data)
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
