"""Watches a run for signs that it becomes unstable: a loss that leaps up, and layers of which float8 loses more than
before. Names the layer that has changed most."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from shardwise.runtime.layer_figures import LayerFigures

WINDOW, LEAST_STEPS = 32, 16
"""A loss leaps where it is above all of the last so many by more than they spread; of these there are at least so
many."""
LEAST_LEAP = 0.1
"""And by more than this share of their median."""
SAMPLES, LEAST_SAMPLES = 8, 2
"""A layer is compared with so many samples before; of these there are at least so many."""
LARGEST_GROWTH = 16.0
"""A sign by itself: the largest input or weight of a layer is so many times the largest before."""
LEAST_SHARE, SHARE_GROWTH = 0.25, 4.0
"""Another: such a share of an operand is lost, and so many times the most before."""
LEAST_GROWTH = 2.0
"""After a leap nothing is named that has grown by less."""
BECOMES = "are at the largest number of float8", "become zero"
"""What the values that two of the figures are shares of do, in their order."""
OTHERS = 3
"""The rank of a change that is no sign by itself; gradient norms come after them."""


@dataclass(frozen=True)
class Change:
    """A figure of a ``layer`` that is ``growth`` times what it was, in words. Causes have a lower ``rank`` than what
    follows from them."""

    layer: str
    growth: float
    words: str
    rank: int
    in_float8: bool = True


@dataclass
class StabilityWatch:
    """``exclude``: what the plan leaves out of float8; it is given once. ``told``: all warnings so far."""

    exclude: Sequence[str] = ()
    told: list[str] = field(default_factory=list)
    _leap: str = ""
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _samples: deque[LayerFigures] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    _named: set[str] = field(default_factory=set)

    def add(self, step: int, loss: float, sample: LayerFigures | None) -> str:
        """Count a step that was not skipped; returns the warning, if it is time for one: after a leap of the loss with
        the next sample, which shows what has changed."""
        if self._leaps(loss):
            self._leap = f"the loss leapt to {loss:.3f} at step {step}, from {max(self._losses):.3f} at most before"
        self._losses.append(loss)
        if sample is None:
            return ""
        changes = sorted(self._changes(sample), key=lambda one: (one.rank, -one.growth))
        self._samples.append(sample)
        worst = next((one for one in changes if one.rank < OTHERS and one.layer not in self._named), None)
        if self._leap:
            worst = next((one for one in changes if one.growth >= LEAST_GROWTH), None)
            self.told.append(self._of_leap(worst))
        elif worst is not None:
            self.told.append(f"warning[NUM004]: step {step}: `{worst.layer}`: {worst.words}\nfix:   {self._fix(worst)}")
        else:
            return ""
        self._leap = ""
        self._named.update([worst.layer] if worst else [])
        return self.told[-1]

    def all_told(self) -> list[str]:
        """Return all warnings, with that of a leap which no sample has followed."""
        return self.told + ([self._of_leap(None)] if self._leap else [])

    def _leaps(self, loss: float) -> bool:
        if len(self._losses) < LEAST_STEPS:
            return False
        spread = max(self._losses) - min(self._losses)
        return loss > max(self._losses) + max(spread, LEAST_LEAP * abs(median(self._losses)))

    def _of_leap(self, worst: Change | None) -> str:
        named = f"; what has changed most is `{worst.layer}`: {worst.words}" if worst else ""
        return f"warning[NUM003]: {self._leap}{named}\nfix:   {self._fix(worst)}"

    def _fix(self, change: Change | None) -> str:
        rest = "a smaller `optim.learning_rate`, from a checkpoint before it"
        if change is None or not change.in_float8:
            return rest
        named = ", ".join([*self.exclude, f"'{change.layer}'"])
        products = "`precision.products: compute` all layers"
        return f"`precision.exclude: [{named}]` takes it out of float8, {products}; or {rest}"

    def _changes(self, sample: LayerFigures) -> Iterator[Change]:
        """Yield what has grown since the samples before."""
        if len(self._samples) < LEAST_SAMPLES:
            return
        for (layer, operand), now in sample.lost.items():
            before = [one.lost[layer, operand] for one in self._samples if (layer, operand) in one.lost]
            growth = _times(now.largest, [one.largest for one in before])
            sign = operand != "gradient" and growth >= LARGEST_GROWTH
            rank = ("weight", "input").index(operand) if sign else OTHERS
            yield Change(layer, growth, f"its largest {operand} is {growth:,.0f} times what it was", rank)
            for place, becomes in enumerate(BECOMES):
                share, most = now[place], max((one[place] for one in before), default=1.0)
                if share >= max(LEAST_SHARE, SHARE_GROWTH * most):
                    words = f"{share:.1%} of the values of its {operand} {becomes} ({most:.1%} at most before)"
                    yield Change(layer, share / max(most, 1e-9), words, OTHERS - 1)
        for name, norm in sample.norms.items():
            growth = _times(norm, [one.norms.get(name, 0.0) for one in self._samples])
            yield Change(name, growth, f"its gradient norm is {growth:,.0f} times what it was", OTHERS + 1, False)


def _times(now: float, before: Sequence[float]) -> float:
    most = max(before, default=0.0)
    return now / most if most else 0.0
