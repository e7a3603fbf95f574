"""AdamW (Loshchilov and Hutter, arXiv 1711.05101): torch's fused kernel, or where moments are rounded one of ours."""

from __future__ import annotations

from torch.optim import AdamW, Optimizer

from shardwise.spec.plan import Plan
from shardwise.spec.recipe import OptimSection
from shardwise.techniques.dtypes import torch_dtype
from shardwise.techniques.optim import fresh_moments
from shardwise.techniques.optim.elementwise import Group
from shardwise.techniques.optim.rounding import RoundedAdamW


def build(groups: list[Group], optim: OptimSection, plan: Plan, seed: int) -> Optimizer:
    """Make it over groups of parameters; ``seed`` is for stochastic rounding."""
    betas, kept = (optim.beta1, optim.beta2), plan.optim.moments
    if kept is not None and "bf16" in (kept, plan.precision.weights):
        return RoundedAdamW(groups, optim.learning_rate, betas, optim.eps, torch_dtype(kept), seed)
    made = AdamW(groups, lr=optim.learning_rate, betas=betas, eps=optim.eps, fused=plan.optim.fused)
    for group in made.param_groups:
        for parameter in group["params"]:
            made.state[parameter] = fresh_moments(parameter)
    return made


def plain(groups: list[Group], optim: OptimSection) -> Optimizer:
    """Make torch's own, operation by operation."""
    return AdamW(groups, betas=(optim.beta1, optim.beta2), eps=optim.eps)
