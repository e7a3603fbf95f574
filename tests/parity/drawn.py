"""Parity of models in which nothing begins at zero, and no norm at one. As they are drawn, biases are zero and so is an
adapter's B, and a norm's weights are all alike: a bias that every rank adds, a sum that the gradient of A lacks, or the
wrong slice of a norm would not be seen in the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.prove.workload import Setting, Workload, random_everywhere
from shardwise.spec.plan import Plan

RANDOM = Setting(draw=random_everywhere)
STEPS = 2
"""The second's moments are of two gradients; warm-up and decay of the rate are the same on all ranks (test_fp64.py)."""


def whole(name: str, spec: ModelSpec) -> Tensor:
    """What the parameter begins as under seed 0."""
    shape = parameter_shapes(spec)[name]
    return random_everywhere(name, shape, [slice(0, size) for size in shape], 0, spec)


def train_on_rank(rank: int, world: int, spec: ModelSpec, plans: Sequence[Plan], steps: int) -> list[parity.Trace]:
    return parity.train_on_rank(rank, world, spec, plans, steps, RANDOM)


def take_steps(rank: int, spec: ModelSpec, plan: Plan, steps: int) -> parity.Trace:
    return parity.take_steps(rank, spec, plan, steps, setting=RANDOM)


def plain(job: Workload) -> parity.Trace:
    return parity.plain(replace(job, setting=RANDOM))


def prove(pool: RankPool, spec: ModelSpec, plans: Sequence[Plan], steps: int = STEPS) -> list[parity.Parity]:
    """As ``parity.prove`` does."""
    return parity.prove(pool, spec, plans, steps, RANDOM)
