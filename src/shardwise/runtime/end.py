"""The end of a run: the last checkpoint, validation, a sample, the exported model, the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from shardwise.data.stream import evaluation
from shardwise.runtime.checkpoint import Checkpoints
from shardwise.runtime.evaluate import Preference, Validation, evaluate, evaluate_pairs
from shardwise.runtime.export import export, export_adapter
from shardwise.runtime.job import Job
from shardwise.runtime.locate import best
from shardwise.runtime.measure import Meter
from shardwise.runtime.metrics import Log
from shardwise.runtime.report import Report
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
    validation = validation or evaluate_now(job, state, log)
    after = sample(job, state)
    close(checkpoints, log)
    parameters = {name: parameter.detach() for name, parameter in state.parameters().items()}
    if job.plan.lora is not None:
        target = export_adapter(parameters, job.plan.lora, job.spec, job.recipe.model.path, job.directory / "adapter")
    else:
        dtype = torch_type(job.plan.precision.weights)
        target = export(parameters, job.spec, job.tokenizer, job.directory / "hf", dtype)
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
        chat=job.recipe.sample_tokens is not None,
    )
    if job.rank == 0:
        kept = job.directory / "report.md"
        trained = state.step > log.first_step  # a run that was finished before keeps what was measured then
        if trained or not kept.exists():
            kept.write_text(report.markdown(), encoding="utf-8")
        log.say("\n".join(closing_lines(report, f"{target.name}/")))
        if job.recipe.checkpoint.keep_best and (found := best(checkpoints.directory)):
            log.say(f"best    step {found[1]:,}, loss {found[0]:.4f}: shardwise export {job.directory} --best")
        log.event("end", step=state.step, tokens=state.tokens)
    return report


def closing_lines(report: Report, model: str) -> Sequence[str]:
    """What is printed at the end."""
    done = f"done    {report.steps:,} steps, {show_count(report.tokens)} tokens in {report.took}"
    lines = [done + (f" · validation {report.validation}" if report.validation else "")]
    if report.before:
        lines += ["before  " + shown(report.before)]
    lines += ["sample  " + shown(report.after), "", report.text(), ""]
    lines += [f"{report.directory}/  checkpoints/ · {model} · metrics.jsonl · report.md"]
    lines += [f"{'next' if index == 0 else '':<8}{line}" for index, line in enumerate(report.next_steps())]
    return lines
