"""Identity preference optimisation (Azar et al., arXiv 2310.12036, equation 17): how much more than the reference the
model prefers the chosen answer is drawn to 1 / (2 beta), and not beyond, as where pairs are always judged alike.

As in TRL, and as its authors trained, log-probabilities are means over the tokens of an answer; rewards are of sums.
"""

from __future__ import annotations

from torch import Tensor

from shardwise.methods.pairs import Answers
from shardwise.spec.recipe import Method


def losses(answers: Answers, method: Method) -> Tensor:
    """The loss of each pair [p]."""
    return (answers.means.margins - 1 / (2 * method.beta)).square()
