"""The beginning of a run: state, resume, fit check, header."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.data.remote import all_shown
from shardwise.errors import ConfigError
from shardwise.models.config import ModelSpec
from shardwise.runtime import fit
from shardwise.runtime.agree import together
from shardwise.runtime.build import begins_trained, build, predictor_is_drawn
from shardwise.runtime.checkpoint.locate import check_length
from shardwise.runtime.checkpoint.save import RunCheckpoints
from shardwise.runtime.faults.guard import SLOWER, Guard
from shardwise.runtime.job import Job
from shardwise.runtime.metrics.log import Log, Screen, Speed, flops_per_token
from shardwise.runtime.metrics.trackers import Subject, track
from shardwise.runtime.owner import Claim
from shardwise.runtime.passes import StepRules, announce_reduce, finish_of
from shardwise.runtime.reference import refer
from shardwise.runtime.report.header import header
from shardwise.runtime.report.interim import InterimPage
from shardwise.runtime.report.sample import keep_first_sample
from shardwise.runtime.report.warn import only_reports
from shardwise.runtime.state import RunFacts, TrainState
from shardwise.spec.devices import find_device
from shardwise.spec.keys import dotted
from shardwise.spec.load import dump_plan, dump_recipe


@dataclass(frozen=True)
class Start:
    """The ways in which a run may start: from another run's checkpoint (``resume_from``), or from scratch although all
    its own checkpoints are damaged (``allow_fresh_start``). A run with intact checkpoints always resumes from the
    newest. ``claim``: its ownership of the directory; None: not claimed. ``spec``: the recipe's model, where the caller
    has read it already."""

    resume_from: Path | None = None
    allow_fresh_start: bool = False
    claim: Claim | None = None
    spec: ModelSpec | None = None


def begin(job: Job, watch: Guard, start: Start) -> tuple[Job, TrainState, StepRules, RunCheckpoints]:
    """The job with its reference, the state to train on from, what is fixed for each step, and where checkpoints go."""
    torch.manual_seed(job.recipe.run.seed)
    plan = job.plan
    finish = finish_of(job.recipe.method, plan)
    run = job.recipe.run
    rules = StepRules(plan, job.meshes, job.recipe.optim, job.max_steps, finish, watch.enter, run.seed, run.watch_steps)
    if job.rank == 0:
        Screen(0).say(header(job))
    with fit.explain_memory(plan, job.device, lambda: "building the model"):
        state = together(lambda: build(job.with_scratch, job.spec, plan, job.meshes, job.device))
    where, staged = job.directory / "checkpoints", "nvme" in (plan.offload.optimizer, plan.offload.weights)
    checkpoints = RunCheckpoints(where, job.recipe.checkpoint, job.run_id, staged_on_disk=staged)
    checkpoints.patience_s = SLOWER * run.timeout_s
    with fit.explain_memory(plan, job.device, lambda: "trying the longest batch"):
        fit.check_fit(state, rules, job.spec.vocab_size, job.device)
    if job.recipe.method.spec.reference:
        job = refer(job, state.parts, watch.enter)
    checkpoints.prepare(state.tensors())
    checkpoints.guard(state.optimizer)
    fresh = start.allow_fresh_start
    facts = checkpoints.resume(state.tensors(), start.resume_from, allow_fresh_start=fresh, kind=RunFacts)
    if facts is not None:
        state.load_facts(facts)
        check_length(state.step, job.max_steps)
    if job.rank == 0:  # only now: a checkpoint that does not fit leaves the run as it was
        _record(job.directory / "recipe.yaml", dump_recipe(job.recipe))
        _record(job.directory / "plan.yaml", dump_plan(plan))
        job.tokenizer.copy_to(job.directory / "tokenizer")
        if state.step == 0 and predictor_is_drawn(job.recipe, job.spec):
            Screen(0).say("the files have no layer that predicts a further token: it begins with random weights")
    announce_reduce(state.parts, watch.enter)
    if state.step == 0 and begins_trained(job.recipe):
        keep_first_sample(job, state, checkpoints.group)
    return job, state, rules, checkpoints


def _record(path: Path, text: str) -> None:
    """Write what the run is, unless the launcher has written the same."""
    if not path.is_file() or path.read_bytes() != text.encode():
        path.write_text(text, encoding="utf-8")


def open_log(job: Job, state: TrainState) -> Log:
    """The run's log, which goes on after the step that ``state`` is at."""
    tracks = None
    if job.rank == 0:
        config = all_shown(dotted(job.recipe.model_dump(mode="json")))
        name = job.recipe.run.name
        tracks = track(job.recipe, Subject(name, job.run_id, job.directory, state.step, config))
    log = Log(job.directory, job.rank, state.step, job.max_steps, speed(job), tracks)
    log.expert_ranks = job.plan.layout.ep
    log.preference.beta = job.recipe.method.beta if job.recipe.method.spec.reference else None
    log.stability.exclude = job.plan.precision.exclude
    log.log_steps = job.recipe.run.log_steps
    log.draw_page = InterimPage(job.directory, job.max_steps, log.say).write
    log.event("start", step=state.step, ranks=job.plan.layout.world)
    if state.step:
        log.say(f"resumed at step {state.step}, {state.tokens:,} tokens in")
    return log


def speed(job: Job) -> Speed:
    """Operations per token, and the peak of all devices, from the table of known GPUs. A CPU's peak is unknown and
    cannot be measured fairly: it depends on the shapes and dtypes of products, and on what else runs."""
    with only_reports("looking up the peak speed of the devices"):
        peak = 0.0 if job.device.type == "cpu" else gpu_peak_flops(torch.cuda.get_device_name(job.device), job)
        return Speed(flops_per_token(job.spec, job.plan), peak * job.plan.layout.world)
    return Speed(0.0, 0.0)


def gpu_peak_flops(name: str, job: Job) -> float:
    """The dense bf16 (or fp16) peak of a known GPU; 0 (unknown) for other devices and dtypes."""
    if job.plan.precision.compute in ("bf16", "fp16"):
        with suppress(ConfigError):
            return find_device(name).bf16_flops
    return 0.0
