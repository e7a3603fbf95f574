"""Schedules of the learning rate: a row each, as numbers of a step, and shapes of a warm-up. One more is a row.

A schedule falls from the full rate, which the warm-up reaches, to ``optim.min_learning_rate``: :attr:`Fall.span` says
from which step over how many, :attr:`Fall.left` how much of the fall is still to come once a share of them is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from shardwise.spec.outside import with_others
from shardwise.spec.records import Fall, over_the_end, over_the_rest, to_the_last, without_end

ENDS, BOUND = ("decay_steps", "min_learning_rate"), 1.0


def _half_cosine(done: float, power: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * min(BOUND, done)))


def _straight(done: float, power: float) -> float:
    return 1.0 - min(BOUND, done)


def _root(done: float, power: float) -> float:
    return 1.0 - math.sqrt(min(BOUND, done))


_OURS = {
    "constant": Fall("the full rate, to the end", (), over_the_rest, lambda done, power: 1.0),
    "linear": Fall("falls along a line", ENDS, over_the_rest, _straight),
    "linear_to_last": Fall("as linear, a step ahead: the last step has the lowest rate", ENDS, to_the_last, _straight),
    "cosine": Fall(
        "falls along half a cosine (Loshchilov and Hutter, arXiv 1608.03983)", ENDS, over_the_rest, _half_cosine
    ),
    "cosine_to_last": Fall(
        "as cosine, a step ahead: the last step has the lowest rate", ENDS, to_the_last, _half_cosine
    ),
    "polynomial": Fall(
        "falls along (1 - t)^power",
        (*ENDS, "power"),
        over_the_rest,
        lambda done, power: (1.0 - min(BOUND, done)) ** power,
    ),
    "inverse_sqrt": Fall(
        "falls as 1 / sqrt(1 + t / decay_steps), t steps after the warm-up (Vaswani et al., arXiv 1706.03762)",
        ENDS,
        without_end,
        lambda done, power: 1.0 / math.sqrt(1.0 + done),
        floor=True,
    ),
    "wsd": Fall("stays at the full rate, and falls along a line at the end of the run", ENDS, over_the_end, _straight),
    "wsd_cosine": Fall("as wsd, along half a cosine", ENDS, over_the_end, _half_cosine),
    "wsd_sqrt": Fall("as wsd, along 1 - sqrt(t) (Hägele et al., arXiv 2405.18392)", ENDS, over_the_end, _root),
    "wsd_exponential": Fall(
        "as wsd, along 2 x 0.5^t - 1", ENDS, over_the_end, lambda done, power: 2.0 * 0.5 ** min(BOUND, done) - 1.0
    ),
}
SCHEDULES = with_others("shardwise.schedules", Fall, _OURS)
"""All schedules by name."""
WARMUPS: dict[str, Callable[[float, float], float]] = {
    "linear": lambda done, steps: done,
    "log": lambda done, steps: min(1.0, math.log(1.0 + done * steps) / math.log(max(2.0, steps))),
    "quadratic": lambda done, steps: done * done,
    "cosine": lambda done, steps: 0.5 * (1.0 - math.cos(math.pi * done)),
    "sqrt": lambda done, steps: 1.0 - math.sqrt(1.0 - done),
}
"""By name, the share of a warm-up's rise that has been made, of the share of its steps that is done, and these."""

if TYPE_CHECKING:
    ScheduleWord = str
    WarmupWord = str
else:
    ScheduleWord = Literal[tuple(SCHEDULES)]
    WarmupWord = Literal[tuple(WARMUPS)]
