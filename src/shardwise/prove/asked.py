"""Are a run's numbers those that its recipe asks for? The learning rate of each step, at the run's own length, beside
transformers' schedulers, which know nothing of ours; where a method compares answers, which way it pulls; and of
weights that are frozen in 4 bits, how far they are from what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch

from shardwise.methods.pairs import Answers, figures, losses_of
from shardwise.prove.beside import quiet
from shardwise.spec.recipe import Method, OptimSection
from shardwise.spec.records import PREFERENCE_FIGURES
from shardwise.techniques.frozen_float8 import eightbit
from shardwise.techniques.nf4 import fourbit
from shardwise.techniques.optim import learning_rate
from shardwise.techniques.quantised import FLOAT8_BLOCK, NF4_BLOCK

TOLERANCE = 1e-9
"""Of rates, relative to the full one; and of losses of pairs."""
LOOKED, PAIRS = 500, 64
"""Of a run's steps at most about so many are looked at; pairs of answers that are drawn."""
WORDS = {"nf4": "4 bits", "float8": "float8"}
MATRIX = (128, 256)
FAR, USUAL = {"nf4": 0.16, "float8": 1 / 17}, {"nf4": 0.096, "float8": 0.027}
"""A matrix of normal numbers in 4 bits is off by at most half the widest step, (1 - 0.696) / 2 of a block's largest,
and by 0.0925 of its length (Dettmers et al., "QLoRA", arXiv 2305.14314); a little more, as scales are in 8 bits. In
float8 it is off by at most half the widest step, 16 of a block's largest, which is 272 of it at least, and by 0.0265 of
the length."""
FALLS = {
    **dict.fromkeys(("linear", "linear_to_last", "wsd"), "linear"),
    **dict.fromkeys(("cosine", "cosine_to_last", "wsd_cosine"), "cosine"),
    "wsd_sqrt": "1-sqrt",
}
"""Of schedules, the shape by which transformers' warmup_stable_decay has the same fall."""
RISES = {"linear": "linear", "cosine": "cosine", "sqrt": "1-sqrt"}
"""Of warm-ups, the same."""
Factor = Callable[[float], float]
"""What the full rate is multiplied by, of a step."""


@dataclass(frozen=True)
class Requested:
    """The numbers that a recipe asks of its ``steps``. ``codes``: how what is frozen is stored, ``nf4`` or
    ``float8``."""

    optim: OptimSection
    method: Method
    steps: int
    codes: str = ""

    @property
    def warmup(self) -> float:
        """The steps of the warm-up."""
        asked = self.optim.warmup_steps
        return asked if asked >= 1 else ceil(asked * self.steps)

    def rise(self) -> Factor | None:
        """Return transformers' warm-up, or None if it has none like it."""
        shape = RISES.get(self.optim.warmup_shape)
        given: dict[str, Any] = {"num_decay_steps": 1, "warmup_type": shape}
        return None if shape is None else _theirs("warmup_stable_decay", self.warmup, self.warmup + 1, given)

    def fall(self) -> Factor | None:
        """Return transformers' rates after the warm-up, or None if it has none like them."""
        optim, warm = self.optim, self.warmup
        low, length = optim.min_learning_rate / optim.learning_rate, optim.decay_steps or self.steps - warm
        if optim.schedule == "constant":
            return lambda step: 1.0
        if optim.schedule == "polynomial":
            ends = {"lr_end": optim.min_learning_rate, "power": optim.power}
            return _theirs("polynomial", warm, warm + length, ends, optim.learning_rate) if low < 1 else None
        if optim.schedule == "inverse_sqrt":
            falling = _theirs("inverse_sqrt", warm, 0, {"timescale": optim.decay_steps or warm or None})
            return lambda step: max(low, falling(step))
        if optim.schedule not in FALLS:
            return None
        held, start = 0.0, -float(optim.schedule.endswith("to_last"))
        if optim.schedule.startswith("wsd"):
            length = optim.decay_steps or max(1, round(self.steps / 10))
            held = max(0.0, self.steps - length - warm)
        given = {"num_decay_steps": length, "min_lr_ratio": low, "decay_type": FALLS[optim.schedule]}
        falling = _theirs("warmup_stable_decay", warm, warm + held + length, given)
        return lambda step: falling(step - start)


def _theirs(name: str, warmup: float, steps: float, given: dict[str, Any], rate: float = 1.0) -> Factor:
    quiet()
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], rate)
    return get_scheduler(name, optimizer, warmup, steps, given).lr_lambdas[0]  # type: ignore[arg-type]


def prove(asked: Requested, told: dict[str, float]) -> Iterator[str]:
    """Yield a line for each thing that is wrong."""
    yield from _rates(asked, told)
    if asked.method.spec.pairs:
        yield from _pulls(asked.method, told)
    if asked.codes:
        yield from _stored(asked.codes)


def _rates(asked: Requested, told: dict[str, float]) -> Iterator[str]:
    """Compare the rates of the first and the last steps, those where the warm-up and the fall begin and end, and others
    between them."""
    optim = asked.optim
    steps = asked.steps
    warm = asked.warmup
    rise = asked.rise()
    fall = asked.fall()
    first = optim.warmup_from
    length = ceil(optim.decay_steps or steps / 10)
    edges = {at + optim.warmup_delay for at in (0, ceil(warm), ceil(warm) + length, steps - length)} | {steps - 1}
    numbers = {*range(0, steps, max(1, steps // LOOKED)), *(edge + by for edge in edges for by in (-2, -1, 0, 1, 2))}
    told["steps"], told["rate"], told["of steps"] = 0, 0.0, steps
    for number in sorted(one for one in numbers if 0 <= one < steps):
        step = max(0, number - optim.warmup_delay)
        factor = rise if step < warm else fall
        if factor is None:
            continue
        begun = step + (first is None) if step < warm else step
        low = (first or 0.0) / optim.learning_rate if step < warm else 0.0
        expected = optim.learning_rate * (low + (1 - low) * factor(begun))
        found = learning_rate(optim, number, steps)
        error = abs(found - expected) / optim.learning_rate
        told["steps"], told["rate"] = told["steps"] + 1, max(told["rate"], error)
        if not error <= TOLERANCE:
            at = f"learning rate of step {number + 1} of {steps}"
            yield f"{at}: {expected:.9g} by transformers' scheduler, {found:.9g} found"
            return


def _pulls(method: Method, told: dict[str, float]) -> Iterator[str]:
    """A step makes the chosen answers likelier, or leaves them, and the rejected ones the other way (a package's method
    may mean something else); rewards, their margins and how often these are above 0 are reported; and of a model that
    is compared with the initial one, only what it has over that counts."""
    draw = np.random.default_rng(0)
    counts = torch.from_numpy(draw.integers(2, 40, (PAIRS, 2)).astype(np.float64))
    logps, moved = (torch.from_numpy(draw.normal(size=(PAIRS, 2))) for _ in range(2))
    logps, zero = (counts * -logps.abs() - 0.1).requires_grad_(), torch.zeros_like(counts)
    compared = method.spec.reference
    answers = Answers(logps, logps.detach().clone() if compared else zero, counts)
    losses = losses_of(answers, method)
    pulls = torch.autograd.grad(losses.sum(), logps)[0] * torch.tensor([1.0, -1.0])
    told["pairs"] = PAIRS
    if (wrong := int((~(pulls <= 0)).any(1).sum())) and not method.spec.module:
        yield f"{method.name}: a step makes {wrong} of {PAIRS} chosen answers less likely, or rejected ones more"
    of = counts if method.spec.averaged else torch.ones_like(counts)
    means, rewards = logps.detach() / of, method.beta * moved / of
    known = [*rewards.T, rewards[:, 0] - rewards[:, 1], (rewards[:, 0] > rewards[:, 1]).double(), *means.T]
    reported = figures(Answers(logps.detach(), logps.detach() - moved, counts), method)
    for name, expected, found in zip(PREFERENCE_FIGURES, known, reported, strict=False):
        if not torch.allclose(expected, found, TOLERANCE, TOLERANCE):
            yield f"{method.name}: what is reported as {name} is not what TRL means by that"
    if compared:
        both = Answers(logps.detach() + moved, answers.references + moved, counts)
        if not torch.allclose(losses_of(both, method), losses.detach(), TOLERANCE, TOLERANCE):
            yield f"{method.name}: how likely pairs are changes the loss where model and reference judge alike"


def _stored(codes: str) -> Iterator[str]:
    """A matrix that goes into 4 bits, or float8, and back is about what it was."""
    matrix = torch.from_numpy(np.random.default_rng(0).normal(size=MATRIX)).float()
    if codes == "nf4":
        found, (rows, columns) = fourbit.dequantise(*fourbit.quantise(matrix), torch.float32), (1, NF4_BLOCK)
    else:
        matrix[:, FLOAT8_BLOCK:] *= 8  # of other scales
        found, (rows, columns) = eightbit.dequantise(eightbit.coded(matrix), torch.float32), 2 * [FLOAT8_BLOCK]
    apart, size = found - matrix, (MATRIX[0] // rows, rows, MATRIX[1] // columns, columns)
    far = float((apart.view(size).abs().amax((1, 3)) / matrix.view(size).abs().amax((1, 3))).max())
    usual = float(apart.norm() / matrix.norm())
    most, length = FAR[codes], USUAL[codes]
    if not (far <= most and usual <= length):
        off = f"off by {usual:.3g} of their length, at most {length}"
        yield f"weights in {WORDS[codes]}: {off}, and by {far:.3g} of a block's largest, at most {most}"
