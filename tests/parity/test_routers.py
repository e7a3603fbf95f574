"""Routers that choose by sigmoids, whose correction moves between steps, or within groups: N ranks are one process. And
faults in it, planted into the ranks' code, which parity sees."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.models import moe
from shardwise.models.kinds import SigmoidRouting
from shardwise.models.moe import MoE
from shardwise.models.router_losses import Routing
from shardwise.prove.pool import RankPool
from shardwise.runtime import expert_counts, step
from tests.parity import drawn, planted, routers
from tests.parity.planted import Fault
from tests.parity.routers import GLM, GROUPED, MODELS, PLANS
from tests.parity.test_fp64 import holds


@pytest.mark.matrix(8)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", PLANS)
def test_ranks_are_one_process(ranks: RankPool, name: str, model: str) -> None:
    of = PLANS[name]
    holds(drawn.prove(ranks, routers.model(model, of), [of], 3), [of])


correct, by_sigmoids, choose = expert_counts.correct, MoE.by_sigmoids, moe.choose


def not_corrected(*given: Any) -> None:
    """The correction stays."""


def of_own_tokens(parts: Any, numbers: Tensor, finite: Tensor) -> None:
    """As if the loads of one rank alone were counted: others are lost."""
    correct(parts, (numbers * torch.rand_like(numbers)).round(), finite)


def other_sign(parts: Any, numbers: Tensor, finite: Tensor) -> None:
    correct(parts, -numbers, finite)


def weights_with_correction(self: MoE, found: Tensor, how: SigmoidRouting) -> Routing:
    routing = by_sigmoids(self, found, how)
    biased = (routing.scores + self.router.correction).gather(-1, routing.ids)
    return routing._replace(weights=how.scale * biased / biased.sum(-1, keepdim=True))


def without_correction(scores: Tensor, correction: Tensor, *rest: int) -> Tensor:
    return choose(scores, torch.zeros_like(correction), *rest)


def of_two_best(scores: Tensor, correction: Tensor | None, *rest: int) -> Tensor:
    return choose(scores, correction, *rest[:3], 2)


FAULTS: dict[str, Fault] = {
    "the correction stays": (lambda: patch.object(step.expert_counts, "correct", not_corrected), GLM, PLANS["zero3"]),
    "loads of other tokens": (lambda: patch.object(step.expert_counts, "correct", of_own_tokens), GLM, PLANS["ddp"]),
    "the other sign": (lambda: patch.object(step.expert_counts, "correct", other_sign), GLM, PLANS["ep"]),
    "weights with the correction": (
        lambda: patch.object(MoE, "by_sigmoids", weights_with_correction),
        GLM,
        PLANS["zero3"],
    ),
    "two best of a group": (lambda: patch.object(moe, "choose", of_two_best), GROUPED, PLANS["ep"]),
    "no correction at all": (lambda: patch.object(moe, "choose", without_correction), GLM, PLANS["tp"]),
}


def train_with_faults(rank: int, world: int, names: list[str]) -> list[tuple[Any, Any]]:
    torch.manual_seed(rank)
    return planted.take_steps(rank, [FAULTS[name] for name in names])


@pytest.mark.prove
def test_every_planted_fault_is_caught(ranks: RankPool) -> None:
    planted.all_seen(FAULTS, ranks.run(train_with_faults, list(FAULTS), world=2))
