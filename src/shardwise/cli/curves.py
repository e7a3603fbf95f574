"""Loss curves as a picture, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from shardwise.errors import Problem, UsageError

KINDS = (".svg", ".png", ".pdf")
Point = tuple[int, float]


@dataclass(frozen=True)
class Curve:
    """A named curve of (step, loss), and dots at the validations."""

    name: str
    line: Sequence[Point]
    marks: Sequence[Point] = ()


def smooth(values: Sequence[float]) -> list[float]:
    """A moving mean over a fiftieth of all values; over fewer at the ends."""
    reach, sums = len(values) // 100, list(accumulate(values, initial=0.0))
    ends = [(max(at - reach, 0), min(at + reach + 1, len(values))) for at in range(len(values))]
    return [(sums[last] - sums[first]) / (last - first) for first, last in ends]


def draw(curves: Sequence[Curve], target: Path) -> None:
    """Write the picture, of one of ``KINDS``. Raises UsageError (CLI001) without matplotlib, OSError like the disk."""
    import numpy as np

    try:
        from matplotlib.figure import Figure
    except ImportError:
        what, fix = "a plot needs matplotlib, which is not installed", "pip install 'shardwise[plot]'"
        raise UsageError(Problem("CLI001", what, "--plot", fix)) from None
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots(subplot_kw={"xlabel": "step", "ylabel": "loss"})
    for curve in curves:
        steps, losses = np.reshape(curve.line, (-1, 2)).T
        (line,) = axes.plot(steps, smooth(losses.tolist()), label=curve.name)
        axes.plot(steps, losses, color=line.get_color(), alpha=0.25, linewidth=0.8, zorder=1)
        axes.plot(*np.reshape(curve.marks, (-1, 2)).T, "o", color=line.get_color())
    axes.legend(title="lines: mean of nearby steps; faint: each step; dots: validation")
    figure.savefig(target)
