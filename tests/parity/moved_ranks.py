"""What ranks do for the test of runs that go on under another layout (test_tp_pairwise.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise.distributed.meshes import meshes
from shardwise.models.config import ModelSpec
from shardwise.prove import parity
from shardwise.prove.workload import random_everywhere
from shardwise.runtime.build import build
from shardwise.runtime.checkpoint.save import RunCheckpoints
from shardwise.runtime.passes import finish_of
from shardwise.runtime.reduce import count_supervised
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import StepRules, step
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Plan, Shard
from shardwise.spec.recipe import Checkpoint, Method, Recipe, Run
from tests.parity.cases import FP64, ROWS, SEQ_LEN

STEPS = 2
"""Before the run is saved, and after."""


@dataclass(frozen=True)
class Side:
    """A layout that a run is saved from, or goes on under: two data-parallel ranks of ``tp`` each. ``lora``: what it
    trains, if not the model."""

    tp: int
    strategy: str
    lora: Lora | None = None

    @property
    def plan(self) -> Plan:
        layout = Layout(dp_replicate=2, tp=self.tp) if self.strategy == "ddp" else Layout(dp_shard=2, tp=self.tp)
        plan = Plan(layout, Batch(ROWS // 2, 1, SEQ_LEN), Shard(self.strategy), FP64)  # type: ignore[arg-type]
        return replace(plan, sequence_parallel=self.tp > 1, lora=self.lora)


@dataclass(frozen=True)
class Stretch:
    """Losses of the steps; weights and moments, whole, before them and after; of adapters, what is frozen below them
    too, which no checkpoint holds."""

    losses: list[float]
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def go(rank: int, world: int, spec: ModelSpec, side: Side, directory: str, first: int) -> Stretch:
    """Begins a run and saves it; or, ``first`` > 0, goes on with what is saved."""
    of = side.plan
    job, groups = parity.job_of(spec, of, 2 * STEPS), meshes(of.layout, "cpu")
    recipe = Recipe(optim=parity.OPTIM, run=Run(seed=job.seed))
    state = build(recipe, spec, of, groups, torch.device("cpu"), random_everywhere)
    checkpoints = RunCheckpoints(directory, Checkpoint(asynchronous=False), "run")
    if first:
        facts = checkpoints.resume(state.tensors(), log=lambda line: None)
        assert facts is not None
        state.load_facts(facts)
        assert state.step == first
    before, losses = whole(state), []
    rules = StepRules(of, groups, parity.OPTIM, parity.MAX_STEPS, finish_of(Method(), of))
    for number in range(first, first + STEPS):
        batches = parity.share_of_rank(job.batch(number), groups, of)
        tokens, _ = count_supervised(groups, sum(batch.supervised_tokens() for batch in batches))
        losses.append(step(state, batches, tokens, rules).loss)
    if not first:
        checkpoints.save(state.tensors(), state.facts(), STEPS)
        assert [event.kind for event in checkpoints.wait()][:1] == ["committed"]
    return Stretch(losses, before, whole(state))


def whole(state: TrainState) -> dict[str, Tensor]:
    frozen = {f"frozen.{name}": value for name, value in state.parameters().items() if not value.requires_grad}
    return {name: parity.full(tensor.detach()) for name, tensor in (state.tensors() | frozen).items()}
