"""Simple preference optimisation (Meng et al., arXiv 2405.14734, equation 6): an answer's reward is beta times the mean
log-probability of its tokens, and the chosen answer's is to be ahead by more than gamma. There is no reference."""

from __future__ import annotations

from torch import Tensor

from shardwise.methods.pairs import Answers, smoothed
from shardwise.spec.recipe import Method


def losses(answers: Answers, method: Method) -> Tensor:
    """The loss of each pair [p]."""
    chosen, rejected = answers.means.logps.unbind(1)
    return smoothed(method.beta * (chosen - rejected) - method.gamma, method)
