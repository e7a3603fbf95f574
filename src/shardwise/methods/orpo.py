"""Odds ratio preference optimisation (Hong et al., arXiv 2403.07691, equations 4 to 7): the chosen answer is learned
as in fine-tuning, and beta times a second term raises its odds over the rejected one's. There is no reference.

With p the mean log-probability of an answer's tokens, exponentiated, its odds are p / (1 - p). TRL's first term is the
mean over the tokens of a micro-batch, prompts included; here, as in the paper, it is the mean over an answer's tokens,
whatever the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from shardwise.methods.pairs import Answers
from shardwise.spec.recipe import Method


def losses(answers: Answers, method: Method) -> Tensor:
    """The loss of each pair [p]."""
    logps = answers.means.logps
    # In fp32 an answer that was learnt by heart has probability 1: its odds are infinite, and derivatives not numbers.
    doubted = logps.clamp_max(-torch.finfo(logps.dtype).eps)
    chosen, rejected = (doubted - (-doubted.expm1()).log()).unbind(1)
    return -logps[:, 0] - method.beta * logsigmoid(chosen - rejected)
