"""What ranks do for the tests of what broke pipelines elsewhere (test_pp_field.py)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise import techniques
from shardwise.data.micro_batch import MicroBatch, collate
from shardwise.data.pack import Sample
from shardwise.distributed.meshes import Meshes, meshes
from shardwise.models.config import ModelSpec
from shardwise.prove import parity, workload
from shardwise.prove.workload import random_everywhere
from shardwise.runtime.build import build
from shardwise.runtime.passes import StepRules, finish_of, from_last_stage, infer, score_of
from shardwise.runtime.pipeline import PipelineRank
from shardwise.runtime.reduce import count_supervised
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import step
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Method, Recipe, Run
from shardwise.techniques.lora import adapter, dropout
from tests.parity import drawn

LENGTHS = (5, 12, 7, 12)
"""Of the micro-batches of one step, the shorter before the longer."""
STEADY = workload.OPTIM.model_copy(update={"schedule": "constant"})
"""The rate of parity's own settings is zero after its tenth step."""


@dataclass
class Began:
    """A run on this rank."""

    state: TrainState
    rules: StepRules
    groups: Meshes

    def step(self, batches: list[MicroBatch]) -> float:
        supervised, _ = count_supervised(self.groups, sum(batch.supervised_tokens() for batch in batches))
        return step(self.state, batches, supervised, self.rules).loss

    def evaluate(self, batches: Sequence[MicroBatch]) -> float:
        """The sum of the losses of all their tokens, alike on every rank."""
        score, total = score_of(self.rules.plan), 0.0
        for batch in batches:
            losses: Tensor | None = infer(self.state.parts, batch, lambda *given: score(*given).sum())
            total += float(from_last_stage(self.state.parts, losses, (), torch.device("cpu")))
        techniques.after_inference(self.state.parts, self.rules.plan)
        return total


def begin(spec: ModelSpec, plan: Plan, enter: Callable[[str], None] = lambda phase: None) -> Began:
    groups = meshes(plan.layout, "cpu")
    recipe = Recipe(optim=workload.OPTIM, run=Run())
    state = build(recipe, spec, plan, groups, torch.device("cpu"), random_everywhere)
    rules = StepRules(plan, groups, workload.OPTIM, parity.MAX_STEPS, finish_of(Method(), plan), enter)
    return Began(state, rules, groups)


def rows_of(spec: ModelSpec, length: int, number: int) -> list[Sample]:
    job = parity.Workload(spec, 2, length, "fp64", "fp64")
    return job.batch(number)


def of_many_lengths(spec: ModelSpec) -> list[MicroBatch]:
    return [collate(rows_of(spec, length, number)) for number, length in enumerate(LENGTHS)]


def lengths(rank: int, world: int, spec: ModelSpec, plan: Plan) -> dict[str, Tensor]:
    """The gradients of a step whose micro-batches differ in length."""
    gradients: dict[str, Tensor] = {}
    run = begin(spec, plan, lambda phase: phase == "clip" and gradients.update(parity.full_gradients(run.state)))  # type: ignore[func-returns-value]
    run.step(of_many_lengths(spec))
    return gradients


def between(rank: int, world: int, spec: ModelSpec, plan: Plan, steps: int) -> list[float]:
    """Evaluation before the first step and after each, and the losses of the steps, in turn."""
    run, job = begin(spec, plan), parity.job_of(spec, plan, steps)
    found = [run.evaluate(of_many_lengths(spec))]
    for number in range(steps):
        found.append(run.step(parity.share_of_rank(job.batch(number), run.groups, plan)))
        found.append(run.evaluate(of_many_lengths(spec)))
    return found


def sleepy(rank: int, world: int, spec: ModelSpec, plan: Plan, steps: int) -> parity.Trace:
    """Ranks that sleep for a while, each for another, before some of what they do."""
    draw, enter = random.Random(rank), PipelineRank.__init__

    def slow(self: PipelineRank[Any], *given: Any) -> None:
        enter(self, *given)
        told = self.enter
        self.enter = lambda phase: (time.sleep(draw.choice((0.0, 0.0, 0.002, 0.01))), told(phase))  # type: ignore[assignment, return-value, func-returns-value]

    with patch.object(PipelineRank, "__init__", slow):
        return drawn.take_steps(rank, spec, plan, steps)


def ends(rank: int, world: int, spec: ModelSpec, plan: Plan, steps: int) -> list[dict[str, Tensor]]:
    """After each step, at a rate that does not fall, what this rank has of the embedding and of the output layer that
    is tied to it, whole."""
    run, job, found = begin(spec, plan), parity.job_of(spec, plan, steps), []
    run.rules = replace(run.rules, optim=STEADY)
    for number in range(steps):
        run.step(parity.share_of_rank(job.batch(number), run.groups, plan))
        named = [pair for part in run.state.parts for pair in part.named_parameters()]
        found.append({name: parity.full(w.detach()) for name, w in named if name in ("embed.weight", "head.weight")})
    return found


def begun(rank: int, world: int, spec: ModelSpec, plan: Plan) -> dict[str, Tensor]:
    """The first weights, whole, by their names in the whole model."""
    return {name: parity.full(weight.detach()) for name, weight in begin(spec, plan).state.parameters().items()}


@dataclass
class Received:
    """At most so many receives were posted at once; how often the memory of one was that of another at that time."""

    most: int = 0
    shared: int = 0


def received(rank: int, world: int, spec: ModelSpec, plan: Plan) -> Received:
    post, found = PipelineRank._post, Received()

    def watched(self: PipelineRank[Any], *given: Any) -> None:
        post(self, *given)
        at = [tensor.untyped_storage().data_ptr() for each in self.posted.values() for _, tensor, _ in each]
        found.most = max(found.most, len(at))
        found.shared += len(at) - len(set(at))

    with patch.object(PipelineRank, "_post", watched):
        run, job = begin(spec, plan), parity.job_of(spec, plan, 1)
        run.step(parity.share_of_rank(job.batch(0), run.groups, plan))
    return found


def overflowing(
    rank: int, world: int, spec: ModelSpec, plan: Plan
) -> list[tuple[bool, float | None, dict[str, Tensor]]]:
    """Of three steps in fp16, the second with a gradient that is not finite on the first stage alone: whether it was
    skipped, the loss's scale, and this rank's weights after it."""
    number = 0

    def enter(phase: str) -> None:
        gradients = (weight.grad for weight in run.state.trained() if weight.grad is not None)
        if phase == "clip" and number == 1 and rank == 0:
            next(gradients).view(-1)[0] = float("inf")

    run, job, found = begin(spec, plan, enter), parity.job_of(spec, plan, 3), []
    for number in range(3):  # enter asks for it
        batches = parity.share_of_rank(job.batch(number), run.groups, plan)
        supervised, _ = count_supervised(run.groups, sum(batch.supervised_tokens() for batch in batches))
        stats = step(run.state, batches, supervised, run.rules)
        weights = {name: parity.full(weight.detach()) for name, weight in run.state.parameters().items()}
        found.append((stats.skipped, stats.loss_scale, weights))
    return found


def dropping(
    rank: int, world: int, spec: ModelSpec, plan: Plan, steps: int
) -> tuple[list[tuple[tuple[int, ...], bytes]], dict[str, Tensor]]:
    """Every mask that this rank drew, in order: its shape and what it keeps; and its weights after the last step."""
    drew, drop = list[tuple[tuple[int, ...], bytes]](), dropout.dropped

    def record(x: Tensor, share: float, place: int | None = None) -> Tensor:
        out = drop(torch.ones_like(x), share, place)
        drew.append((tuple(x.shape), (out > 0).numpy().tobytes()))
        return x * out

    with patch.object(adapter, "dropped", record):
        return drew, drawn.take_steps(rank, spec, plan, steps).weights


@dataclass
class Meanwhile:
    """How many gradients left while autograd still ran their backward, of how many; whether all weights of this rank's
    stages were whole when it first waited for another."""

    early: int = 0
    sent: int = 0
    whole: bool | None = None


def meanwhile(rank: int, world: int, spec: ModelSpec, plan: Plan) -> Meanwhile:
    """The second step of a run."""
    found, running = Meanwhile(), False
    send, wait, backward = PipelineRank._send, PipelineRank._wait, torch.autograd.backward

    def sends(self: PipelineRank[Any], action: Any) -> None:
        if action.kind == "SEND_B":
            found.sent, found.early = found.sent + 1, found.early + running
        send(self, action)

    def waits(self: PipelineRank[Any], *given: Any) -> None:
        if found.whole is None:
            weights = [weight for part in self.parts.values() for weight in part.parameters()]
            found.whole = not any(isinstance(weight, DTensor) for weight in weights)
        wait(self, *given)

    def goes_back(*given: Any) -> None:
        nonlocal running
        running = True
        backward(*given)
        running = False

    run, job = begin(spec, plan), parity.job_of(spec, plan, 2)
    run.step(parity.share_of_rank(job.batch(0), run.groups, plan))
    changed = {"_send": sends, "_wait": waits}
    with patch.multiple(PipelineRank, **changed), patch.object(torch.autograd, "backward", goes_back):
        run.step(parity.share_of_rank(job.batch(1), run.groups, plan))
    return found
