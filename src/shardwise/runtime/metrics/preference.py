"""Watches the training pairs of a preference run: what they have come to lately, and whether the chosen answers become
less likely, which the loss does not show, since it is about the difference of the two answers alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

WINDOW, WINDOWS = 5, 3
"""A fall is steady where the mean over each of so many windows of so many steps is below that of the one before."""
LEAST_FALL = 0.1
"""No warning is given of less than this share of what the log-probability was under the reference."""


@dataclass
class PreferenceWatch:
    """``beta`` is that of a method with a reference; None: there is no warning. It is given once."""

    beta: float | None = None
    warned: bool = False
    _steps: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=WINDOW * WINDOWS))

    def add(self, figures: Mapping[str, float]) -> str:
        """Count a step that was not skipped; returns the warning, if it is time for it."""
        if "logps/chosen" not in figures:
            return ""
        self._steps.append(figures)
        if self.beta is None or self.warned or len(self._steps) < WINDOW * WINDOWS:
            return ""
        if (fall := self._fall(self.beta)) < LEAST_FALL:
            return ""
        self.warned = True
        told = f"has fallen for {len(self._steps)} steps and is {fall:.0%} below the reference's; the loss hides it"
        fix = "a lower optim.learning_rate or a higher method.beta keeps the model nearer to the reference"
        return f"warning[DPO002]: the log-probability of chosen answers {told}\nfix:   {fix}"

    def means(self) -> dict[str, float]:
        """Each figure over the last steps; empty without pairs."""
        names = self._steps[-1] if self._steps else ()
        return {name: fmean(step[name] for step in self._steps) for name in names}

    def _fall(self, beta: float) -> float:
        """Return by what share of the reference's log-probability that of chosen answers lies below it, where it has
        fallen steadily; else 0."""
        steps = list(self._steps)
        windows = [steps[first : first + WINDOW] for first in range(0, len(steps), WINDOW)]
        gains = [fmean(step["rewards/chosen"] for step in window) / beta for window in windows]
        steady = all(later < earlier for earlier, later in pairwise(gains))
        reference = fmean(step["logps/chosen"] for step in windows[-1]) - gains[-1]
        return gains[-1] / reference if steady and reference < 0 else 0.0
