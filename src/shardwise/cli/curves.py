"""Loss curves as an SVG picture, written by hand: no library is needed to look at two runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 520, 70, 20, 30, 50
COLOURS = ("#1f6fb4", "#d95f02")
MOST_POINTS = 1000
Point = tuple[int, float]


@dataclass(frozen=True)
class Curve:
    """A named line of (step, loss), and marks at the validations."""

    name: str
    line: Sequence[Point]
    marks: Sequence[Point] = ()


def draw(curves: Sequence[Curve]) -> str:
    """The picture of up to two curves."""
    points = [point for curve in curves for point in (*curve.line, *curve.marks)] or [(0, 0.0)]
    losses = [value for _, value in points]
    steps, values = ticks(0, max(step for step, _ in points)), ticks(min(losses), max(losses))

    def place(point: tuple[float, float]) -> tuple[float, float]:
        across = (point[0] - steps[0]) / ((steps[-1] - steps[0]) or 1)
        up = (point[1] - values[0]) / ((values[-1] - values[0]) or 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for value in values:
        _, y = place((0, value))
        lines.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for step in steps:
        x, _ = place((step, values[0]))
        lines.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{step:,g}</text>')
    lines.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">step</text>')
    for number, (curve, colour) in enumerate(zip(curves, COLOURS, strict=False)):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, thinned(curve.line)))
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in map(place, curve.marks)]
        legend = escape(curve.name) + (" (dots: validation)" if curve.marks else "")
        corner = f'x="{WIDTH - RIGHT}" y="{TOP + 18 * number}"'
        lines.append(f'<text {corner} text-anchor="end" fill="{colour}">{legend}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def thinned(line: Sequence[Point]) -> Iterator[Point]:
    """At most about MOST_POINTS of them, always with the last."""
    every = max(1, len(line) // MOST_POINTS)
    yield from (point for index, point in enumerate(line) if index % every == 0 or index == len(line) - 1)


def ticks(low: float, high: float) -> list[float]:
    """Four to ten round numbers that enclose ``low`` to ``high``."""
    span = (high - low) or 1.0
    size = 10 ** math.floor(math.log10(span))
    size *= next(factor for factor in (0.1, 0.2, 0.5, 1, 2) if span / (size * factor) <= 8)
    first, last = math.floor(low / size), math.ceil(high / size)
    return [round(size * number, 10) for number in range(first, max(last, first + 1) + 1)]
