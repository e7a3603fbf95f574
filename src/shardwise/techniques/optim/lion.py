"""Lion (Chen et al., arXiv 2302.06675): every weight moves by the learning rate, in the direction of the sign of a mean
of gradients. Its usual rate is 3 to 10 times below AdamW's, and its decay as much above."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.spec.plan import Plan
from shardwise.spec.recipe import OptimSection
from shardwise.techniques.optim.elementwise import Elementwise, Group
from shardwise.techniques.optim.elementwise import regimes as regimes


class Lion(Elementwise):
    """One moment, which follows gradients with beta2; the step looks at it with beta1."""

    kept = ("exp_avg",)

    def updated(self, grad: Tensor, group: Group, weight: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        (mean,), (first, second), rate = kept, group["betas"], group["lr"]
        direction = mean.lerp(grad, 1 - first).sign_()
        return (weight * (1 - rate * group["weight_decay"])).sub_(direction, alpha=rate), mean.lerp(grad, 1 - second)


class PlainLion(Optimizer):
    """The paper's algorithm 2, line by line; torch has none."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in (each for each in group["params"] if each.grad is not None):
                mean = self.state[weight].get("mean", torch.zeros_like(weight))
                moved = torch.sign(first * mean + (1 - first) * weight.grad) + group["weight_decay"] * weight
                weight -= group["lr"] * moved
                self.state[weight]["mean"] = second * mean + (1 - second) * weight.grad


def build(groups: list[Group], optim: OptimSection, plan: Plan, seed: int) -> Optimizer:
    """Make it over groups of parameters; nothing in it is drawn."""
    return Lion(groups, betas=(optim.beta1, optim.beta2))


def plain(groups: list[Group], optim: OptimSection) -> Optimizer:
    """Make the paper's."""
    return PlainLion(groups, {"lr": optim.learning_rate, "betas": (optim.beta1, optim.beta2)})
