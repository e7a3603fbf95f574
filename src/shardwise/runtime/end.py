"""The end of a run: the last checkpoint, validation, a sample, the exported model, the report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from shardwise.data.stream import EvaluationBatch, evaluation
from shardwise.data.whole import write_whole
from shardwise.distributed.slices import kept
from shardwise.errors import OutputError, PreemptedError, Problem
from shardwise.models.stored import KeptLayers
from shardwise.runtime.answers import answer_tasks
from shardwise.runtime.checkpoint.host_group import HostGroup
from shardwise.runtime.checkpoint.locate import best, newest
from shardwise.runtime.checkpoint.manifest import step_name, train_again, whole
from shardwise.runtime.checkpoint.save import RunCheckpoints
from shardwise.runtime.evaluate import evaluate, evaluate_pairs
from shardwise.runtime.export import export, export_adapter, kept_of
from shardwise.runtime.faults.guard import Guard, StopRequest
from shardwise.runtime.job import Job
from shardwise.runtime.metrics.log import Log
from shardwise.runtime.metrics.measure import Meter
from shardwise.runtime.report.answer_tables import answer_tables, side_by_side
from shardwise.runtime.report.report import Report
from shardwise.runtime.report.report_page import REPORT_PAGE, report_page
from shardwise.runtime.report.results import Preference, Validation
from shardwise.runtime.report.run_files import read_history, remarkable
from shardwise.runtime.report.sample import earlier_sample, sample, shown
from shardwise.runtime.report.warn import only_reports
from shardwise.runtime.state import TrainState
from shardwise.spec.plan import Traffic
from shardwise.spec.units import counted, show_count, typed
from shardwise.techniques.dtypes import torch_dtype


def close(checkpoints: RunCheckpoints, log: Log) -> None:
    """Wait for the save in flight and log its outcome."""
    log.follow(checkpoints.wait())


@contextmanager
def saving(checkpoints: RunCheckpoints, log: Log) -> Iterator[None]:
    """If the block fails, wait for the save in flight, whose state was good; a minute at most, since a rank may be
    gone."""
    try:
        yield
    except Exception:
        log.follow(checkpoints.wait(60.0))
        raise


def validate(job: Job, state: TrainState, log: Log, stop: StopRequest) -> Validation | Preference | None:
    """The validation of the held-out text, or pairs; None if nothing is held out, or if the run was asked to stop
    meanwhile."""
    windows = job.held_out
    if windows is None or not len(windows):
        return None
    share = replace(job.share, accumulation=1)
    total = -(-len(job.evaluated) // (share.dp * share.micro_batch_size))
    batches = until_asked(evaluation(windows, share, numbers=job.evaluated), total, job, log, stop)
    found = (evaluate_pairs if job.recipe.pairs else evaluate)(job, state.parts, batches)
    return None if stop.everywhere else found


def until_asked(
    batches: Iterable[EvaluationBatch], total: int, job: Job, log: Log, stop: StopRequest
) -> Iterator[EvaluationBatch]:
    """Pass ``batches`` on, with a bar, until any rank is asked to stop. Ranks end at the same batch: they vote."""
    for done, batch in enumerate(batches):
        asked = torch.tensor(float(bool(stop)), device=job.device)
        job.meshes.sum(asked, "world")
        stop.everywhere = bool(asked)
        if stop.everywhere:
            return
        log.progress("validation", done, total)
        yield batch
    log.progress("validation", total, total)


def evaluate_now(
    job: Job, state: TrainState, group: HostGroup, log: Log, stop: StopRequest
) -> Validation | Preference | None:
    """Validate between two steps, print and log the result, and count it in ``state`` for early stopping; then answer
    the tasks, for which ``group`` are the ranks (:func:`task_group`)."""
    found = validate(job, state, log, stop)
    if found is not None:
        state.judge(found.loss)
        log.event("validation", step=state.step, **found.facts())
        log.say(f"step {state.step}: validation {found}")
    if not stop.everywhere:
        answer_tasks(job, state, group, log)
    log.start_clock()
    return found


def leave(job: Job, checkpoints: RunCheckpoints, log: Log, watch: Guard, stop: StopRequest) -> NoReturn:
    """Raise PreemptedError, which says how to resume the run. Only the ranks that received a signal know its name."""
    close(checkpoints, log)
    watch.enter("save")  # looks once more whether the newest checkpoint is still this run's own
    last = newest(job.directory / "checkpoints")
    saved = "nothing is saved" if last is None else f"saved at step {int(last.name[5:])} of {job.max_steps}"
    what = f"asked to stop{f' ({stop.name})' if stop.name else ''}: {saved}"
    fix = train_again(job.directory)
    raise PreemptedError(Problem("STOP001", what, str(job.directory), fix))


def report_run(
    job: Job,
    state: TrainState,
    checkpoints: RunCheckpoints,
    log: Log,
    meter: Meter,
    validation: Validation | Preference | None,
) -> Report:
    """Return the report of a run that is over, its model exported and validated. Every rank calls this; rank 0 writes
    and prints it. Raises OutputError CKPT023 where the last step has no checkpoint."""
    after = sample(job, state, checkpoints.group)
    trained = state.step > log.first_step
    there = checkpoints.group.first(lambda: whole(checkpoints.directory / step_name(state.step)))
    unsaved = log.unsaved if trained and not there else None
    kept_best = best(checkpoints.directory) if job.recipe.checkpoint.keep_best else None
    again = f"shardwise export {typed(job.directory)} --best{' --adapter' * (job.plan.lora is not None)}"
    best_line = kept_best and f"step {kept_best[1]:,}, loss {kept_best[0]:.4f}: {again}"
    report = Report(
        directory=job.directory,
        steps=state.step,
        tokens=state.tokens,
        seconds=log.run_s(),
        since=log.first_step,
        step_s=log.step_s(),
        estimate=job.plan.estimate,
        validation=validation,
        memory=meter.memory,
        traffic=tuple(Traffic(axis, kind, "", *sent) for (axis, kind), sent in meter.traffic.items()),
        before=earlier_sample(job),
        after=after,
        skipped=log.skipped,
        unsaved=unsaved,
        chat=job.recipe.sample_tokens is not None,
        adapter=job.plan.lora is not None,
        expert_imbalance=log.expert_imbalance,
        supervised=state.supervised,
        padding=state.step * job.step_room - state.tokens,
        pairs=log.preference.means(),
        notes=[
            *remarkable(job.directory),
            *[f"Stopped early: {state.stale} validations in a row found no lower loss."] * stops_early(job, state),
            *[warning.replace("\nfix:   ", ". Fix: ") + "." for warning in log.stability.all_told()],
            *[f"Best checkpoint: {best_line}"] * bool(best_line),
        ],
    )
    if job.rank == 0:
        if trained or not (job.directory / "report.md").exists():  # else it keeps what was measured then
            write_reports(job.directory, report, log)
        with only_reports("the summary", log.say):
            log.say("\n".join(closing_lines(report, f"{model_directory(job).name}/")))
            if best_line:
                log.say(f"best    {best_line}")
        log.event("end", step=state.step, tokens=state.tokens)
    if unsaved is not None:
        checkpoints.group.first(lambda: None)  # the first rank has written everything before any rank fails
        raise OutputError(lost(job, state.step, unsaved))
    return report


def write_reports(directory: Path, report: Report, log: Log) -> None:
    """Write report.md, report.json and report.html, as far as that is possible."""
    with only_reports("report.md", log.say):
        text = "\n".join([report.markdown(), *side_by_side(answer_tables(directory))])
        (directory / "report.md").write_text(text, encoding="utf-8")
        report.keep()
    with only_reports(REPORT_PAGE, log.say):
        page = report_page(report, read_history(directory), answer_tables(directory))
        write_whole(directory / REPORT_PAGE, page.html())


def stops_early(job: Job, state: TrainState) -> bool:
    """Return whether as many validations as the recipe waits for have found no lower loss."""
    patience = job.recipe.evaluate.early_stopping_patience
    return patience is not None and state.stale >= patience


def model_directory(job: Job) -> Path:
    """The directory to which the model, or its adapter, is exported."""
    return job.directory / ("hf" if job.plan.lora is None else "adapter")


def write_model(job: Job, state: TrainState, log: Log) -> None:
    """Export what was trained, beside it the tokenizer."""
    parameters = {name: kept(parameter) for name, parameter in state.parameters().items()}
    if job.plan.lora is not None:
        export_adapter(parameters, job.plan.lora, job.spec, job.recipe.model.path, model_directory(job))
        if job.rank == 0:
            job.tokenizer.copy_to(model_directory(job))
        return
    beside, left_out = kept_of(job.recipe, job.spec) if job.rank == 0 else (KeptLayers(), "")
    dtype = torch_dtype(job.plan.precision.weights)
    export(parameters, job.spec, job.tokenizer, model_directory(job), dtype, beside)
    if left_out:
        log.say(left_out)


def lost(job: Job, step: int, why: str) -> Problem:
    """CKPT023: all steps are done, but the checkpoint of the last one is not there."""
    what = f"training is done, but the checkpoint of its last step {step} is not there{why and f': {why}'}"
    last, run = newest(job.directory / "checkpoints"), job.directory
    again = f"train --resume {typed(run)}` repeats the steps after {int(last.name[5:])}" if last else "train` it again"
    fix = f"use the model in {model_directory(job)}, or `shardwise {again}"
    return Problem("CKPT023", what, str(run / "checkpoints"), fix)


def closing_lines(report: Report, model: str) -> Sequence[str]:
    """Return the lines that are printed at the end."""
    done = (
        f"done    {counted(report.steps, 'step')}, {show_count(report.tokens)} tokens{report.shares} in {report.took}"
    )
    lines = [done + (f" · validation {report.validation}" if report.validation else "")]
    if report.unsaved is not None:
        lines += [f"NOT SAVED  {report.warning}"]
    if report.before:
        lines += ["before  " + shown(report.before)]
    lines += ["sample  " + shown(report.after)] * bool(report.after) + ["", report.text(), ""]
    written = [name for name in ("report.md", REPORT_PAGE) if (report.directory / name).is_file()]
    lines += [f"{report.directory}/  {' · '.join(['checkpoints/', model, 'metrics.jsonl', *written])}"]
    lines += [f"{'next' if index == 0 else '':<8}{line}" for index, line in enumerate(report.next_steps())]
    return lines
