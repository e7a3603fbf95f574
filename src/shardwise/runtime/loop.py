"""The life of a run, from top to bottom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from shardwise.data.remote import all_shown
from shardwise.data.stream import stream
from shardwise.runtime.agree import agree
from shardwise.runtime.answers import task_group
from shardwise.runtime.begin import Start, begin, open_log
from shardwise.runtime.check_bits import BitsCheck
from shardwise.runtime.end import close, evaluate_now, leave, report_run, saving, stops_early, write_model
from shardwise.runtime.faults import guard
from shardwise.runtime.fit import explain_memory
from shardwise.runtime.garbage import collecting
from shardwise.runtime.job import Job, agree_on_identity, device_kind, identity, open_job
from shardwise.runtime.metrics.log import Log
from shardwise.runtime.metrics.measure import Meter
from shardwise.runtime.metrics.pace import RankPace
from shardwise.runtime.metrics.pending import AfterStep, PendingSteps
from shardwise.runtime.metrics.profile import profiled
from shardwise.runtime.reduce import count_tokens
from shardwise.runtime.report.report import Report
from shardwise.runtime.report.results import Preference, Validation
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import launch
from shardwise.runtime.transfer import Upload
from shardwise.runtime.world import process, world
from shardwise.spec.keys import dotted
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe


def train(recipe: Recipe, plan: Plan, after_step: Sequence[AfterStep] = (), start: Start = Start()) -> Report:  # noqa: B008
    """Train as ``recipe`` says, split as ``plan`` says; every rank calls this alike. ``after_step`` functions are
    called after each step. Raises ShardwiseError: PreemptedError when it was asked to stop, after saving."""
    job = open_job(recipe, plan, start.spec)
    with (
        guard.watching(job.directory, process(), recipe.run.timeout_s, start.claim) as watch,
        guard.stop_requests() as stop,
        world(plan.layout, device_kind(recipe), recipe.run.timeout_s, watch) as meshes,
        explain_memory(plan, job.device, watch.doing),
    ):
        agree(recipe, plan, job.prepared.manifest.fingerprint)
        job = agree_on_identity(job, meshes)
        job, state, rules, checkpoints = begin(job, watch, start)
        profile, rules = profiled(job, state.parts, rules)
        log, group = open_log(job, state), task_group(job)
        pending = PendingSteps(job, state, log, checkpoints, after_step, RankPace(job, state.parts, log))
        with log, profile, saving(checkpoints, log), pending, collecting() as collect:
            meter, upload = Meter(meshes, job.device), Upload(job.device)
            waits = partial(watch.enter, "wait"), partial(log.say, "waits for data: the next portion is being prepared")
            batches = stream(job.portions or job.windows, job.order, job.share, state.cursor, waits, job.end)
            bits, validation, good = BitsCheck(job, state, rules, log), None, True
            for number in range(state.step + 1, job.max_steps + 1):
                if stops_early(job, state):
                    tell_early_stop(log, state)
                    break
                batch = watch.fetch(number, batches)
                with profile.step(number) if number in profile.steps else meter.measuring(state):
                    typical = number not in profile.steps and not meter.measured
                    supervised, counts, stopping = count_tokens(meshes, batch.terms, batch.tokens, bool(stop))
                    launched = launch(state, upload(batch.micro_batches), supervised, rules, counts, typical)
                state.cursor = batch.cursor
                watch.enter("save" if checkpoints.flight.undecided else "logging")
                pending.add(launched, batch, typical)
                if stopping or evaluates(job, number) or saves(job, number) or bits.due(number):
                    pending.log_all()
                collect(number)
                validation = None
                if evaluates(job, number):
                    watch.enter("evaluate")
                    validation = evaluate_now(job, state, group, log, stop)
                better = validation is not None and checkpoints.beats(validation.loss)
                stopping = stopping or stop.everywhere
                last = stopping or number == job.max_steps or stops_early(job, state)
                if bits.after(number, better or last or saves(job, number)):
                    watch.enter("save")
                    good = pending.settle(upload, rules) if last else state.finite() and not state.skipped_in_row
                    checkpoints.save(state.tensors(), facts_of(job, state, validation), number, good, known=last)
                    log.start_clock()
                log.follow(checkpoints.poll())
                if stopping and number < job.max_steps:
                    leave(job, checkpoints, log, watch, stop)
            watch.enter("end")
            close(checkpoints, log)
            if not good:
                pending.refuse()
            write_model(job, state, log)  # first: validation and report can wait
            validation = validation or evaluate_now(job, state, group, log, stop)
            if stop.everywhere:
                leave(job, checkpoints, log, watch, stop)
            return report_run(job, state, checkpoints, log, meter, validation)


def evaluates(job: Job, number: int) -> bool:
    """Return whether validation follows step ``number``. After the last step it is part of the end of the run, except
    with ``keep_best``, where the checkpoint must record its result."""
    every = job.eval_steps
    if number == job.max_steps:
        return job.recipe.checkpoint.keep_best
    return every is not None and number % every == 0


def saves(job: Job, number: int) -> bool:
    """Return whether a checkpoint follows step ``number``, whatever validation finds."""
    return number == job.max_steps or number % job.save_steps == 0


def tell_early_stop(log: Log, state: TrainState) -> None:
    """Log why the run ends before its last step."""
    log.say(f"stopped early: the last {state.stale} validations found no lower loss")
    log.event("stopped early", step=state.step)


def facts_of(job: Job, state: TrainState, validation: Validation | Preference | None) -> dict[str, Any]:
    """Return the facts that a checkpoint holds besides tensors: the run's identity and state, the settings it was
    trained with (secrets in URLs hidden), and the validation loss, if the step was validated, by which the best is
    found."""
    settings = {"settings": all_shown(dotted(job.recipe.model_dump(mode="json")))}
    known = validation is not None and math.isfinite(validation.loss)
    return state.facts() | identity(job) | settings | ({"validation": validation.loss} if known and validation else {})
