"""Direct preference optimisation (Rafailov et al., arXiv 2305.18290): the model learns to prefer the chosen of two
answers to the rejected one, more than the initial model (the reference) does.

A pair's margin is m = (log p(chosen) - log p(rejected)) - the same of the reference; its loss is -log sigmoid(beta m).
With label smoothing e, the share of pairs that are the wrong way round, it is that times 1 - e, and -log sigmoid(-beta
m) times e (cDPO, Mitchell 2023).
"""

from __future__ import annotations

from torch import Tensor

from shardwise.methods.pairs import Answers, smoothed
from shardwise.spec.recipe import Method


def losses(answers: Answers, method: Method) -> Tensor:
    """The loss of each pair [p]."""
    return smoothed(method.beta * answers.margins, method)
