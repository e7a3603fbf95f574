"""Lion (Chen et al., arXiv 2302.06675): every weight moves by the learning rate, in the direction of the sign of a mean
of gradients. Its usual rate is 3 to 10 times below AdamW's, and its decay as much above."""

from __future__ import annotations

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


def build(groups: list[Group], optim: OptimSection, plan: Plan, seed: int) -> Optimizer:
    """Make it over groups of parameters; nothing in it is drawn."""
    return plain(groups, optim)


def plain(groups: list[Group], optim: OptimSection) -> Optimizer:
    """Make the same; torch has none."""
    return Lion(groups, betas=(optim.beta1, optim.beta2))
