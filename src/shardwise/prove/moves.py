"""A run that is saved under one layout and goes on under another: what was saved, what is loaded, what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise.distributed.meshes import meshes
from shardwise.distributed.slices import kept
from shardwise.models.config import ModelSpec
from shardwise.prove.parity import CPU, full, share_of_rank
from shardwise.prove.workload import MAX_STEPS, Setting, job_of
from shardwise.runtime.build import build
from shardwise.runtime.checkpoint.save import RunCheckpoints
from shardwise.runtime.passes import StepRules, finish_of
from shardwise.runtime.reduce import count_supervised
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import step
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Pipeline, Plan, Shard
from shardwise.spec.recipe import Checkpoint, Recipe, Run

STEPS = 2
"""Before the run is saved, and after."""


@dataclass(frozen=True)
class Stretch:
    """Losses of the steps; weights and moments, whole, before them and after; of adapters, what is frozen below them
    too, which no checkpoint holds."""

    losses: list[float]
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def elsewhere(plan: Plan) -> Plan:
    """Another layout for the same rows: two ranks, each with the whole model or, if the plan's ranks have that, with a
    shard of it."""
    whole = plan.shard.strategy != "ddp" or plan.layout.pp > 1 or plan.layout.tp > 1
    rows = plan.batch.global_batch_size(plan.layout.dp)
    ranks = 2 if rows % 2 == 0 else 1
    layout = Layout(dp_replicate=ranks) if whole else Layout(dp_shard=ranks)
    return replace(
        plan,
        layout=replace(layout, ranks_per_node=ranks),
        batch=replace(plan.batch, micro_batch_size=1, accumulation=rows // ranks),
        shard=Shard("ddp" if whole else "zero3", bucket_bytes=plan.shard.bucket_bytes),
        precision=replace(plan.precision, gather="compute"),
        sequence_parallel=False,
        pipeline=Pipeline(),
    )


@dataclass(frozen=True)
class SavedRun:
    """The directory of a run that is saved, and after how many steps it goes on; 0: it begins."""

    directory: str
    first: int = 0


def go(rank: int, world: int, spec: ModelSpec, plan: Plan, run: SavedRun, setting: Setting | None = None) -> Stretch:
    """Begins a run and saves it, or goes on with what is saved."""
    first = run.first
    job, groups = job_of(spec, plan, 2 * STEPS, setting), meshes(plan.layout, "cpu")
    state = build(Recipe(optim=job.setting.optim, run=Run(seed=job.seed)), spec, plan, groups, CPU, job.setting.draw)
    checkpoints = RunCheckpoints(run.directory, Checkpoint(asynchronous=False), "run")
    if first:
        facts = checkpoints.resume(state.tensors(), log=lambda line: None)
        if facts is None or facts["step"] != first:
            raise RuntimeError(f"no checkpoint of step {first} could be loaded: {facts}")
        state.load_facts(facts)
    before, losses = _whole(state), []
    rules = StepRules(plan, groups, job.setting.optim, MAX_STEPS, finish_of(job.setting.method, plan))
    for _ in range(STEPS):
        batches = share_of_rank(job.batch(state.cursor // job.rows), groups, plan, ahead=spec.predictors > 0)
        terms, _ = count_supervised(groups, sum(batch.terms() for batch in batches))
        losses.append(step(state, batches, terms, rules).loss)
        state.cursor += job.rows
    if not first:
        checkpoints.save(state.tensors(), state.facts(), STEPS)
        if (events := [event.kind for event in checkpoints.wait()])[:1] != ["committed"]:
            raise RuntimeError(f"the checkpoint was not committed: {events}")
    return Stretch(losses, before, _whole(state))


def _whole(state: TrainState) -> dict[str, Tensor]:
    frozen = {f"frozen.{name}": value for name, value in state.parameters().items() if not value.requires_grad}
    return {name: full(kept(tensor)) for name, tensor in (state.tensors() | frozen).items()}


def differences(saved: list[Stretch], loaded: list[Stretch]) -> list[str]:
    """Return what a run that goes on does not have as it was saved, bit by bit."""
    known = {name: value for stretch in saved for name, value in stretch.after.items()}
    there = {name for stretch in loaded for name in stretch.before}
    found = [f"{name} was saved, and no rank has it" for name in known.keys() - there]
    found += [f"{name} was not saved" for name in there - known.keys()]
    for rank, stretch in enumerate(loaded):
        for name, value in stretch.before.items():
            if name in known and not torch.equal(value, known[name]):
                found.append(f"{name} of rank {rank} is not what was saved")
    return found
