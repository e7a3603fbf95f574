"""The life of a run, from top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.data.stream import stream
from shardwise.errors import PreemptedError, Problem, TrainingError
from shardwise.runtime import guard
from shardwise.runtime.agree import agree
from shardwise.runtime.begin import Start, begin, open_log
from shardwise.runtime.end import close, evaluate_now, finish
from shardwise.runtime.job import Job, device_kind, open_job, settle
from shardwise.runtime.measure import Meter
from shardwise.runtime.profile import Profile
from shardwise.runtime.reduce import count_supervised
from shardwise.runtime.report import Report
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import StepStats, step
from shardwise.runtime.world import process, world
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Recipe

AfterStep = Callable[[TrainState, StepStats], None]


def train(recipe: Recipe, plan: Plan, after_step: Sequence[AfterStep] = (), start: Start = Start()) -> Report:  # noqa: B008
    """Train as ``recipe`` says, split as ``plan`` says; every rank calls this alike. ``after_step`` functions are
    called after each step. Raises ShardwiseError: PreemptedError when it was asked to stop, after saving."""
    job = open_job(recipe, plan)
    with (
        guard.watching(job.directory, process(), recipe.run.timeout_s) as watch,
        guard.stop_requests() as stop,
        world(plan.layout, device_kind(recipe), recipe.run.timeout_s) as mesh,
    ):
        agree(recipe, plan)
        job = settle(job)
        state, rules, checkpoints = begin(job, mesh, watch, start)
        with open_log(job, state) as log, profile_of(job) as profile:
            meter = Meter(mesh, job.device)
            batches = stream(job.windows, job.order, job.share, state.cursor)
            for number in range(state.step + 1, job.max_steps + 1):
                batch = watch.fetch(number, batches)
                micro_batches = [micro.to(job.device) for micro in batch.micro_batches]
                profiled = number in profile.steps
                with profile.step(number) if profiled else meter.measuring(state):
                    supervised = count_supervised(batch.supervised_tokens, job.device)
                    stats = step(state, micro_batches, supervised, rules, bool(stop))
                state.cursor = batch.cursor
                watch.enter("logging")
                log.step(state, stats, job.device, typical=not (profiled or meter.measured))
                if state.skipped_in_row > recipe.run.max_skipped_steps:
                    close(checkpoints, log)
                    allowed = recipe.run.max_skipped_steps
                    raise TrainingError(guard.poisoned(state.skipped_in_row, allowed, number, batch.sample_ids))
                for call in after_step:
                    call(state, stats)
                if evaluates(job, number):
                    watch.enter("evaluate")
                    evaluate_now(job, state, log)
                if stats.stop or number == job.max_steps or number % job.save_steps == 0:
                    watch.enter("save")
                    checkpoints.save(state.tensors(), state.facts(), number, finite=not state.skipped_in_row)
                log.follow(checkpoints.poll())
                if stats.stop and number < job.max_steps:
                    close(checkpoints, log)
                    raise PreemptedError(stopped(job, state, stop.name))
            watch.enter("end")
            return finish(job, state, checkpoints, log, meter)


def evaluates(job: Job, number: int) -> bool:
    """Whether validation follows step ``number``; the one after the last step is part of the end."""
    every = job.recipe.evaluate.eval_steps
    return every is not None and number % every == 0 and number < job.max_steps


def profile_of(job: Job) -> Profile:
    """The profile that the recipe asks for, perhaps of no step."""
    return Profile(job.directory / "profile", job.recipe.run.profiled, job.rank, job.device)


def stopped(job: Job, state: TrainState, signal: str) -> Problem:
    """What PreemptedError says; ``signal`` is empty on ranks that did not get one."""
    return Problem(
        "STOP001",
        f"asked to stop{f' ({signal})' if signal else ''}: saved at step {state.step} of {job.max_steps}",
        str(job.directory),
        f"shardwise train --resume {job.directory}",
    )
