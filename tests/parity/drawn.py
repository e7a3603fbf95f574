"""Parity of models in which nothing begins at zero, and no norm at one. As they are drawn, biases are zero and so is an
adapter's B, and a norm's weights are all alike: a bias that every rank adds, a sum that the gradient of A lacks, or the
wrong slice of a norm would not be seen in the first step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from unittest.mock import patch

from torch import Tensor

from shardwise.models import init
from shardwise.models.config import ModelSpec, parameter_shapes
from shardwise.models.roles import role
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.spec.plan import Plan

DEVIATION = 0.2
fill = init.fill


def random_fill(name: str, shape: Sequence[int], part: Sequence[slice], seed: int, spec: ModelSpec) -> Tensor:
    begun = fill(name, shape, part, seed, spec)
    if role(name) in ("bias", "lora_b", "norm"):
        begun += init._normal(name, shape, part, seed).mul_(DEVIATION)
    return begun


def whole(name: str, spec: ModelSpec) -> Tensor:
    """What the parameter begins as under seed 0."""
    shape = parameter_shapes(spec)[name]
    return random_fill(name, shape, [slice(0, size) for size in shape], 0, spec)


def drawn() -> AbstractContextManager[Any]:
    """Everything that is filled within the block is random."""
    return patch.object(init, "fill", random_fill)


def train_on_rank(rank: int, world: int, spec: ModelSpec, plans: Sequence[Plan], steps: int) -> list[parity.Trace]:
    with drawn():
        return parity.train_on_rank(rank, world, spec, plans, steps)


@cache
def plain(job: parity.Workload) -> parity.Trace:
    with drawn():
        return parity.plain.__wrapped__(job)


def prove(pool: RankPool, spec: ModelSpec, plans: Sequence[Plan], steps: int = parity.STEPS) -> list[parity.Parity]:
    """As ``parity.prove`` does."""
    found: dict[int, parity.Parity] = {}
    for world in sorted({plan.layout.world for plan in plans}):
        chosen = [index for index, plan in enumerate(plans) if plan.layout.world == world]
        answers = pool.run(train_on_rank, spec, [plans[i] for i in chosen], steps, world=world, timeout_s=300)
        for place, index in enumerate(chosen):
            right = plain(parity.job_of(spec, plans[index], steps))
            staged = plans[index].layout.pp > 1
            found[index] = parity.compare(right, [traces[place] for traces in answers], staged=staged)
    return [found[index] for index in range(len(plans))]
