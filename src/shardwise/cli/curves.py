"""Loss curves, and the loads of experts, as a picture, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from shardwise.cli.options import misused

KINDS = (".svg", ".png", ".pdf")
Point = tuple[int, float]


@dataclass(frozen=True)
class Curve:
    """A named curve of (step, loss), and dots at the validations."""

    name: str
    line: Sequence[Point]
    marks: Sequence[Point] = ()


@dataclass(frozen=True)
class LoadMap:
    """The loads of experts in a named run: by step and layer, how many times its even share the fullest expert has."""

    name: str
    fullest: Mapping[int, Mapping[int, float]]


def smooth(values: Sequence[float]) -> list[float]:
    """A moving mean over a fiftieth of all values; over fewer at the ends."""
    reach, sums = len(values) // 100, list(accumulate(values, initial=0.0))
    ends = [(max(at - reach, 0), min(at + reach + 1, len(values))) for at in range(len(values))]
    return [(sums[last] - sums[first]) / (last - first) for first, last in ends]


def draw(curves: Sequence[Curve], target: Path, maps: Sequence[LoadMap] = ()) -> None:
    """Write the picture, of one of ``KINDS``, the maps below the curves. Raises UsageError (CLI001) without matplotlib,
    OSError like the disk."""
    import numpy as np

    try:
        from matplotlib.figure import Figure
    except ImportError:
        what, fix = "a plot needs matplotlib, which is not installed", "pip install 'shardwise[plot]'"
        raise misused(what, fix, "--plot") from None
    figure = Figure(figsize=(9, 5 + 3 * len(maps)), layout="constrained")
    heights = [5, *[3] * len(maps)]
    axes, *below = figure.subplots(len(heights), squeeze=False, gridspec_kw={"height_ratios": heights}).ravel()
    axes.set(xlabel="step", ylabel="loss")
    for curve in curves:
        steps, losses = np.reshape(curve.line, (-1, 2)).T
        (line,) = axes.plot(steps, smooth(losses.tolist()), label=curve.name)
        axes.plot(steps, losses, color=line.get_color(), alpha=0.25, linewidth=0.8, zorder=1)
        axes.plot(*np.reshape(curve.marks, (-1, 2)).T, "o", color=line.get_color())
    axes.legend(title="lines: mean of nearby steps; faint: each step; dots: validation")
    for place, one in zip(below, maps, strict=True):
        _heat(figure, place, one)
    figure.savefig(target)


def _heat(figure: Any, axes: Any, loads: LoadMap) -> None:
    """A column for each step, empty where a step has no line, and a row for each layer."""
    import numpy as np

    steps, layers = sorted(loads.fullest), sorted({layer for each in loads.fullest.values() for layer in each})
    values = np.full((len(layers), steps[-1] - steps[0] + 1), np.nan)
    for step, each in loads.fullest.items():
        values[:, step - steps[0]] = [each.get(layer, np.nan) for layer in layers]
    extent = (steps[0] - 0.5, steps[-1] + 0.5, -0.5, len(layers) - 0.5)
    shown = axes.imshow(values, origin="lower", aspect="auto", interpolation="nearest", extent=extent, vmin=1.0)
    ticks = range(0, len(layers), 1 + len(layers) // 12)
    axes.set(xlabel="step", ylabel="layer", title=f"{loads.name}: load of the fullest expert")
    axes.set_yticks([*ticks], [str(layers[tick]) for tick in ticks])
    figure.colorbar(shown, ax=axes, label="times an even share")
