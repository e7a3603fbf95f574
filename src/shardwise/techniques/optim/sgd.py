"""Stochastic gradient descent with momentum (``optim.beta1``), as torch.optim.SGD has it: decay is part of the
gradient."""

from __future__ import annotations

from torch import Tensor
from torch import optim as theirs
from torch.optim import Optimizer

from shardwise.spec.plan import Plan
from shardwise.spec.recipe import OptimSection
from shardwise.techniques.optim.elementwise import Elementwise, Group
from shardwise.techniques.optim.elementwise import regimes as regimes


class Momentum(Elementwise):
    """One moment: the sum of gradients, each older one times ``momentum`` once more."""

    kept = ("momentum_buffer",)

    def updated(self, grad: Tensor, group: Group, weight: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        momentum = (kept[0] * group["momentum"]).add_(grad.add(weight, alpha=group["weight_decay"]))
        return weight.sub(momentum, alpha=group["lr"]), momentum


def build(groups: list[Group], optim: OptimSection, plan: Plan, seed: int) -> Optimizer:
    """Make it over groups of parameters; nothing in it is drawn."""
    return Momentum(groups, momentum=optim.beta1)


def plain(groups: list[Group], optim: OptimSection) -> Optimizer:
    """Make torch's own."""
    return theirs.SGD(groups, momentum=optim.beta1)
