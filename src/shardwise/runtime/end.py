"""The end of a run: the last checkpoint, validation, a sample, the exported model, the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from shardwise.data.stream import evaluation
from shardwise.errors import OutputError, Problem
from shardwise.runtime.checkpoint import Checkpoints
from shardwise.runtime.evaluate import Preference, Validation, evaluate, evaluate_pairs
from shardwise.runtime.export import export, export_adapter
from shardwise.runtime.job import Job
from shardwise.runtime.locate import best, newest
from shardwise.runtime.manifest import step_name, whole
from shardwise.runtime.measure import Meter
from shardwise.runtime.metrics import Log
from shardwise.runtime.report import Report
from shardwise.runtime.reporting import only_reports
from shardwise.runtime.sample import earlier_sample, sample, shown
from shardwise.runtime.state import TrainState
from shardwise.spec.units import show_count
from shardwise.techniques.numbers import torch_type


def close(checkpoints: Checkpoints, log: Log) -> None:
    """Wait for the save in flight and note what became of it."""
    log.follow(checkpoints.wait())


@contextmanager
def saving(checkpoints: Checkpoints, log: Log) -> Iterator[None]:
    """What fails in the block waits for the save in flight, whose state was good; a minute, as a rank may be gone."""
    try:
        yield
    except Exception:
        log.follow(checkpoints.wait(60.0))
        raise


def validate(job: Job, state: TrainState) -> Validation | Preference | None:
    """What is measured on the held-out text, or pairs; None where nothing is held out."""
    windows = job.held_out
    if windows is None or not len(windows):
        return None
    batches = evaluation(windows, replace(job.share, accumulation=1), numbers=job.evaluated)
    chunk = job.plan.batch.loss_chunk_tokens
    if job.recipe.pairs:
        return evaluate_pairs(state.parts, batches, chunk, job.device, job.recipe.method)
    return evaluate(state.parts, batches, chunk, job.device)


def evaluate_now(job: Job, state: TrainState, log: Log) -> Validation | Preference | None:
    """Validate between two steps and say what came out."""
    found = validate(job, state)
    if found is not None:
        log.event("validation", step=state.step, **found.facts())
        log.say(f"step {state.step}: validation {found}")
    log.start_clock()
    return found


def finish(
    job: Job,
    state: TrainState,
    checkpoints: Checkpoints,
    log: Log,
    meter: Meter,
    validation: Validation | Preference | None = None,
) -> Report:
    """Everything that follows the last step; on every rank alike, and rank 0 writes and prints. ``validation``: of the
    last step, if that is done already."""
    close(checkpoints, log)
    target = write_model(job, state)  # before what only tells of it
    validation = validation or evaluate_now(job, state, log)
    after = sample(job, state, checkpoints.crew)
    trained = state.step > log.first_step
    there = checkpoints.crew.first(lambda: whole(checkpoints.directory / step_name(state.step)))
    unsaved = log.unsaved if trained and not there else None
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
        traffic=meter.traffic,
        before=earlier_sample(job),
        after=after,
        skipped=log.skipped,
        unsaved=unsaved,
        chat=job.recipe.sample_tokens is not None,
    )
    if job.rank == 0:
        kept = job.directory / "report.md"
        with only_reports("report.md", log.say):
            if trained or not kept.exists():  # a run that was finished before keeps what was measured then
                kept.write_text(report.markdown(), encoding="utf-8")
        with only_reports("the summary", log.say):
            log.say("\n".join(closing_lines(report, f"{target.name}/")))
            if job.recipe.checkpoint.keep_best and (found := best(checkpoints.directory)):
                log.say(f"best    step {found[1]:,}, loss {found[0]:.4f}: shardwise export {job.directory} --best")
        log.event("end", step=state.step, tokens=state.tokens)
    if unsaved is not None:
        checkpoints.crew.first(lambda: None)  # the first rank has written everything before any rank fails
        raise OutputError(lost(job, state.step, unsaved, target))
    return report


def write_model(job: Job, state: TrainState) -> Path:
    """Export what was trained, the model or its adapter; the directory."""
    parameters = {name: parameter.detach() for name, parameter in state.parameters().items()}
    if job.plan.lora is not None:
        return export_adapter(parameters, job.plan.lora, job.spec, job.recipe.model.path, job.directory / "adapter")
    dtype = torch_type(job.plan.precision.weights)
    return export(parameters, job.spec, job.tokenizer, job.directory / "hf", dtype)


def lost(job: Job, step: int, why: str, model: Path) -> Problem:
    """CKPT023: all steps are done, but the checkpoint of the last one is not there."""
    what = f"training is done, but the checkpoint of its last step {step} is not there{why and f': {why}'}"
    last = newest(job.directory / "checkpoints")
    again = (
        f"train --resume {job.directory}` repeats the steps after {int(last.name[5:])}" if last else "train` it again"
    )
    return Problem(
        "CKPT023", what, str(job.directory / "checkpoints"), f"use the model in {model}, or `shardwise {again}"
    )


def closing_lines(report: Report, model: str) -> Sequence[str]:
    """What is printed at the end."""
    done = f"done    {report.steps:,} steps, {show_count(report.tokens)} tokens in {report.took}"
    lines = [done + (f" · validation {report.validation}" if report.validation else "")]
    if report.unsaved is not None:
        lines += [f"NOT SAVED  {report.warning}"]
    if report.before:
        lines += ["before  " + shown(report.before)]
    lines += ["sample  " + shown(report.after)] * bool(report.after) + ["", report.text(), ""]
    lines += [f"{report.directory}/  checkpoints/ · {model} · metrics.jsonl · report.md"]
    lines += [f"{'next' if index == 0 else '':<8}{line}" for index, line in enumerate(report.next_steps())]
    return lines
