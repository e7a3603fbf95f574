"""What ranks do for the tests of what broke mixtures of experts elsewhere (test_ep_field.py)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from shardwise.models.config import ModelSpec
from shardwise.models.moe import MoE
from shardwise.models.router_losses import Routing
from shardwise.prove import parity
from shardwise.prove.workload import Setting, random_everywhere
from shardwise.runtime import reduce
from shardwise.spec.plan import Plan
from shardwise.techniques.ep import dispatch
from tests.parity import drawn, field_ranks


@dataclass(frozen=True)
class Favoured:
    """First weights as always, but for the biases of routers: so much more for the ``experts``. 40 is more than what
    the logits of the tiny models differ by; with 1,000 the others' scores are zero, exactly."""

    experts: tuple[int, ...]
    more: float = 40.0

    def __call__(self, name: str, shape: Sequence[int], part: Sequence[slice], seed: int, spec: ModelSpec) -> Tensor:
        begun = random_everywhere(name, shape, part, seed, spec)
        if name.endswith("router.bias"):
            added = torch.zeros(*shape)
            added[list(self.experts)] = self.more
            begun += added[part[0]]
        return begun


def traces(
    rank: int, world: int, spec: ModelSpec, plans: Sequence[Plan], steps: int, setting: Setting
) -> list[tuple[parity.Trace, list[float]]]:
    """Under each plan the trace, and what gradients were multiplied by in each step."""
    found, clip = [], reduce.clip_factor
    for plan in plans:
        factors: list[float] = []

        def clipped(norm: Tensor, most: float | None, factors: list[float] = factors) -> Tensor:
            factors.append(float(clip(norm, most)))
            return clip(norm, most)

        with patch.object(reduce, "clip_factor", clipped):
            found.append((parity.take_steps(rank, spec, plan, steps, setting=setting), factors))
    return found


def routed(rank: int, world: int, spec: ModelSpec, plan: Plan) -> list[Tensor]:
    """The experts that were chosen in one step, each time that they were."""
    found, route = list[Tensor](), MoE.route

    def watched(self: MoE, x: Tensor) -> Routing:
        routing = route(self, x)
        found.append(routing.ids.clone())
        return routing

    with patch.object(MoE, "route", watched):
        drawn.take_steps(rank, spec, plan, 1)
    return found


def sleepy(rank: int, world: int, spec: ModelSpec, plan: Plan, steps: int, setting: Setting) -> parity.Trace:
    """Ranks that sleep for a while, each for another, before some of their rows go out, and before some come back."""
    draw, computed = random.Random(rank), dispatch.computed_elsewhere

    def sleep() -> None:
        time.sleep(draw.choice((0.0, 0.0, 0.002, 0.01)))

    def slow(products: Callable[..., Tensor], *given: Any) -> Tensor:
        def late(*own: Tensor) -> Tensor:
            sleep()
            return products(*own)

        sleep()
        return computed(late, *given)

    with patch.object(dispatch, "computed_elsewhere", slow):
        return parity.take_steps(rank, spec, plan, steps, setting=setting)


def held(rank: int, world: int, spec: ModelSpec, plan: Plan, steps: int) -> list[dict[str, list[int]]]:
    """After each step, at a rate that does not fall, digests of what this rank holds."""
    run, job, found = field_ranks.begin(spec, plan), parity.job_of(spec, plan, steps), []
    run.rules = replace(run.rules, optim=field_ranks.STEADY)
    for number in range(steps):
        run.step(parity.share_of_rank(job.batch(number), run.groups, plan))
        found.append(parity.held(run.state))
    return found


def twice(rank: int, world: int, spec: ModelSpec, plans: Sequence[Plan]) -> list[tuple[parity.Trace, parity.Trace]]:
    """The same two steps, two times."""
    return [(drawn.take_steps(rank, spec, plan, 2), drawn.take_steps(rank, spec, plan, 2)) for plan in plans]
