"""What the parity of preference optimisation runs on each rank: the reference pass and the steps of a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.data.pack import Packs
from shardwise.data.store import load
from shardwise.data.stream import EvaluationBatch, evaluation, stream
from shardwise.distributed.meshes import meshes
from shardwise.models.config import ModelSpec
from shardwise.prove import parity, workload
from shardwise.prove.workload import random_everywhere
from shardwise.runtime import reduce
from shardwise.runtime.build import build
from shardwise.runtime.evaluate import evaluate, evaluate_pairs
from shardwise.runtime.job import Job
from shardwise.runtime.passes import finish_of
from shardwise.runtime.reference import refer
from shardwise.runtime.report.results import Preference, Validation
from shardwise.runtime.step import StepRules, step
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Data, Method, Recipe, Run

CPU = torch.device("cpu")
SEQ_LEN = 48
Trained = tuple[parity.Trace, dict[str, np.ndarray], list[dict[str, float]]]
METHOD = Method(name="dpo", beta=0.5, label_smoothing=0.1)


def recipe_of(directory: Path, name: str = "run") -> Recipe:
    """A recipe whose prepared data lie in ``directory``."""
    run = Run(out=str(directory / "runs"), name=name, seed=0)
    return Recipe(method=METHOD, optim=workload.OPTIM, run=run, data=Data(path=str(directory / "pairs")))


def job_of(directory: Path, spec: ModelSpec, plan: Plan, steps: int) -> Job:
    """The run as :func:`open_job` would give it."""
    groups = meshes(plan.layout, "cpu")
    return Job(recipe_of(directory), plan, spec, load(directory / "pairs"), CPU, steps, groups)


@contextmanager
def named(rank: int) -> Iterator[None]:
    """As a launcher would have told this process its rank."""
    before = os.environ.get("RANK")
    os.environ["RANK"] = str(rank)
    try:
        yield
    finally:
        del os.environ["RANK"]
        if before is not None:
            os.environ["RANK"] = before


def train(rank: int, world: int, directory: str, spec: ModelSpec, plans: Sequence[Plan], steps: int) -> list[Trained]:
    """One training after another; of each its trace, what the reference said, and the figures of every step."""
    with named(rank):
        return [one(rank, Path(directory), spec, plan, steps) for plan in plans]


def one(rank: int, directory: Path, spec: ModelSpec, plan: Plan, steps: int) -> Trained:
    job = job_of(directory, spec, plan, steps)
    if rank == 0:
        shutil.rmtree(job.directory, ignore_errors=True)
        job.directory.mkdir(parents=True)
    dist.barrier()
    state = build(job.recipe, spec, plan, job.meshes, CPU)
    phases: list[str] = []
    job = refer(job, state.parts, phases.append)
    assert set(phases) == {"evaluate"}
    gradients: dict[str, Tensor] = {}

    def enter(phase: str) -> None:
        if phase == "clip" and state.step == 0:
            gradients.update(parity.full_gradients(state))

    rules = StepRules(plan, job.meshes, workload.OPTIM, parity.MAX_STEPS, finish_of(METHOD, plan), enter)
    assert isinstance(job.windows, Packs)
    batches, losses, norms, figures = stream(job.windows, job.order, job.share), [], [], []
    for _ in range(steps):
        batch = next(batches)
        stats = step(state, batch.micro_batches, reduce.count_supervised(job.meshes, batch.terms)[0], rules)
        losses.append(stats.loss)
        norms.append(stats.grad_norm)
        figures.append(dict(stats.figures))
    weights = {name: parity.full(parameter.detach()) for name, parameter in state.parameters().items()}
    return parity.Trace(tuple(losses), tuple(norms), gradients, weights), dict(job.references), figures


def evaluated(rank: int, world: int, directory: str, spec: ModelSpec, plan: Plan) -> tuple[Validation, Preference]:
    """What validation finds in texts, and in held-out pairs, of a model that is far from its reference."""
    with named(rank):
        job = job_of(Path(directory), spec, plan, 1)
        if rank == 0:
            shutil.rmtree(job.directory, ignore_errors=True)
            job.directory.mkdir(parents=True)
        dist.barrier()
        job = refer(job, build(job.recipe, spec, plan, job.meshes, CPU).parts, lambda phase: None)
        state = build(job.recipe, spec, plan, job.meshes, CPU, random_everywhere)
        odd = replace(plan, batch=replace(plan.batch, seq_len=SEQ_LEN - 1))  # which no number of ranks divides
        rows = parity.share_of_rank(parity.job_of(spec, odd, 1).batch(0), job.meshes, odd)
        texts = [EvaluationBatch(batch, batch.supervised_tokens(), 1.0) for batch in rows]
        assert isinstance(job.held_out, Packs)
        pairs = evaluation(job.held_out, replace(job.share, accumulation=1), numbers=job.evaluated)
        return evaluate(job, state.parts, texts), evaluate_pairs(job, state.parts, pairs)


def grown(rank: int, world: int, directory: str, spec: ModelSpec, plan: Plan) -> list[dict[str, np.ndarray]]:
    """What the reference says in a short run, and when the same run has become longer."""
    with named(rank):
        return [scores(rank, Path(directory), spec, plan, steps) for steps in (1, 3)]


def scores(rank: int, directory: Path, spec: ModelSpec, plan: Plan, steps: int) -> dict[str, np.ndarray]:
    job = job_of(directory, spec, plan, steps)
    if rank == 0:
        job.directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = build(job.recipe, spec, plan, job.meshes, CPU)
    return dict(refer(job, state.parts, lambda phase: None).references)
