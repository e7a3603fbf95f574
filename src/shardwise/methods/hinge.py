"""The hinge loss of SLiC-HF (Zhao et al., arXiv 2305.10425) of DPO's margins, as in RSO (Liu et al., arXiv
2309.06657): a pair whose chosen answer is ahead by 1 / beta or more teaches nothing."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import relu

from shardwise.methods.pairs import Answers
from shardwise.spec.recipe import Method


def losses(answers: Answers, method: Method) -> Tensor:
    """The loss of each pair [p]."""
    return relu(1 - method.beta * answers.margins)
