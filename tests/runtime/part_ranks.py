"""A model whole and in parts, and what the tests of parts train on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardwise import techniques
from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed.meshes import Meshes, meshes
from shardwise.distributed.slices import local
from shardwise.models.blocks import tie
from shardwise.models.config import ModelSpec, with_fields
from shardwise.models.hf_model import model_of
from shardwise.runtime.build import allocate, fill
from shardwise.runtime.passes import StepRules, finish_of
from shardwise.runtime.state import TrainState
from shardwise.runtime.step import StepStats, step
from shardwise.spec.plan import Batch, Plan
from shardwise.spec.recipe import Method, OptimSection, Recipe
from shardwise.techniques import optim
from tests.models.families import spec_of

KINDS = ("sliding_attention", "full_attention", "full_attention", "sliding_attention")
SPEC = with_fields(spec_of("gemma2"), num_hidden_layers=4, layer_types=KINDS, sliding_window=3)
"""Layers take turns with and without a window, so that a block by another's number would be seen."""
WHOLE = ((0, 1, 2, 3),)
TWO = ((0,), (1, 2, 3))
THREE = ((0, 1), (2,), (3,))
ENDS_ALONE = ((), (0, 1, 2, 3), ())
Stages = Sequence[Sequence[int]]
SETTINGS = OptimSection(learning_rate=1e-2, max_grad_norm=0.5)
LENGTH = 12
BATCH = Batch(1, 2, LENGTH, 8)
Values = dict[str, Tensor]


def spec_for(*, tied: bool) -> ModelSpec:
    return replace(SPEC, tie_word_embeddings=tied)


def state_of(spec: ModelSpec, stages: Stages, plan: Plan, groups: Meshes, recipe: Recipe = Recipe()) -> TrainState:  # noqa: B008
    """The parts of these stages, the first with the embedding and the last with norm and output layer."""
    last = len(stages) - 1
    with torch.device("meta"):
        parts = [model_of(spec, blocks, embedding=i == 0, head=i == last) for i, blocks in enumerate(stages)]
    if spec.tie_word_embeddings:
        tie(parts)
    applied = techniques.apply([*parts], plan, groups, lambda parts: allocate(parts, spec, torch.device("cpu")))
    fill(applied, spec, recipe, plan)
    return TrainState(applied, optim.build(applied, SETTINGS, plan))


def rows(number: int, rank: int = 0) -> list[MicroBatch]:
    """Two micro-batches of one row, whose first half is a chosen answer and whose second is the rejected one."""
    drawn = torch.Generator().manual_seed(10 * number + rank)
    ids, labels = (torch.randint(SPEC.vocab_size, (2, LENGTH), generator=drawn) for _ in range(2))
    positions = torch.arange(LENGTH)[None]
    answers, references = (positions >= LENGTH // 2).long(), torch.tensor([[0.25, 0.0]], dtype=torch.float64)
    each = ids.split(1), labels.split(1)
    return [MicroBatch(*one, positions, None, LENGTH, answers, references) for one in zip(*each, strict=True)]


def trained(state: TrainState, plan: Plan, groups: Meshes) -> tuple[list[StepStats], Values]:
    """Two steps; what they say, and every gradient of the first before it was clipped."""
    gradients: Values = {}

    def enter(phase: str) -> None:
        if phase == "clip" and state.step == 0:
            held = {name: p.grad for name, p in state.parameters().items() if p.grad is not None}
            gradients.update({name: local(gradient).clone() for name, gradient in held.items()})

    method = Method(name="dpo") if plan.loss == "dpo" else Method()
    rules = StepRules(plan, groups, SETTINGS, 3, finish_of(method, plan), enter)
    terms = 2 * groups.size("batch") * (1 if plan.loss == "dpo" else LENGTH)
    stats = [step(state, rows(number, groups.index("batch")), terms, rules) for number in range(2)]
    return stats, gradients


def said(stats: Sequence[StepStats]) -> list[tuple[float, float]]:
    return [(one.loss, one.grad_norm) for one in stats]


def differences(whole: Values, cut: Values) -> list[str]:
    """The names of what is not the same, bit by bit."""
    alike = {name for name in whole.keys() & cut.keys() if torch.equal(whole[name], cut[name])}
    return sorted((whole.keys() | cut.keys()) - alike)


def weights(state: TrainState) -> Values:
    """This rank's slices of weights and moments."""
    return {name: local(value).clone() for name, value in state.tensors().items()}


def compare(rank: int, world: int, plans: Sequence[Plan], stages: Stages, tied: bool) -> list[list[str]]:
    """Train whole and cut under each plan; what differs on this rank."""
    found = []
    for plan in plans:
        groups, spec = meshes(plan.layout, "cpu"), spec_for(tied=tied)
        states = [state_of(spec, each, plan, groups) for each in (WHOLE, stages)]
        (one, first), (other, second) = (trained(state, plan, groups) for state in states)
        unlike = ["what the steps say"] * (said(one) != said(other))
        found.append(unlike + differences(first, second) + differences(*map(weights, states)))
    return found
