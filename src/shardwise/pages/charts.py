"""Charts as SVG: lines, points, stacked bars and areas. Colours are classes, which the page's style sheet gives a value
for light, dark and paper; every mark that has figures tells them in its ``<title>``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, product
from math import ceil, floor, isfinite, log10
from typing import NamedTuple

LEFT, RIGHT, TOP, BOTTOM = 76, 34, 14, 44
"""What stands around the plot, in pixels: numbers and the axis's name on the left and below."""
COLOURS = 16
"""How many colours the style sheet has; a chart with more series begins anew."""
WIDE, ROW, LINE = 960, 26, 16
"""The width of a wide picture, and the heights of a row of bars and of a line of words."""
FLAT = 3
"""A range so many times as long as that of typical values flattens them."""
MOST_BEYOND = 6
"""Of how many values beyond a picture its note tells."""

Point = tuple[float, float]


class Dot(NamedTuple):
    """A point of a scatter: what is written beside it, what it tells, and which of its classes it has."""

    x: float
    y: float
    label: str
    told: str
    kind: str


@dataclass(frozen=True)
class Picture:
    """A chart: its SVG and the names of its colours and of its lines (``line c1``), by class."""

    title: str
    svg: str
    legend: Sequence[tuple[str, str]] = ()
    note: str = ""
    wide: bool = False


def element(name: str, inside: str = "", **attributes: object) -> str:
    """An element; ``inside`` is markup already, attributes are text."""
    given = "".join(f' {key.strip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items())
    return f"<{name}{given}>{inside}</{name}>" if inside else f"<{name}{given}/>"


def _value(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else escape(str(value))


def colour(number: int) -> str:
    """The class of the series of this number."""
    return f"c{number % COLOURS}"


def colours(names: Iterable[str]) -> list[tuple[str, str]]:
    """A legend of series in the order of their colours."""
    return [(colour(number), name) for number, name in enumerate(names)]


def shown(value: float) -> str:
    """A number of an axis."""
    return f"{value:,.6g}" if value == 0 or 1e-3 <= abs(value) < 1e7 else f"{value:.3g}"


def ticks(least: float, most: float, count: int = 5) -> list[float]:
    """Round numbers from ``least`` to ``most``, about ``count`` of them."""
    if not most > least:
        return [least]
    rough = (most - least) / count
    unit = 10.0 ** floor(log10(rough))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= rough * 0.999)
    first, last = ceil(least / step - 1e-9), floor(most / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def thinned(points: Sequence[Point], pixels: int) -> list[Point]:
    """Return the points that can be seen of ``points``, which are sorted by x: of each pixel the first, the last, the
    least and the most, in their order. Values that are not finite stay where a pixel has no others: there a line is
    interrupted."""
    if len(points) <= 4 * pixels:
        return [*points]
    low, width = points[0][0], (points[-1][0] - points[0][0]) or 1.0
    kept = []
    for _, group in groupby(points, key=lambda point: int((point[0] - low) / width * pixels)):
        found = [*group]
        finite = [i for i, (_, y) in enumerate(found) if isfinite(y)]
        chosen = {0} if not finite else {finite[0], finite[-1]}
        if finite:
            chosen |= {pick(finite, key=lambda i: found[i][1]) for pick in (min, max)}
        kept += [found[i] for i in sorted(chosen)]
    return kept


@dataclass(frozen=True)
class Frame:
    """A plot with two axes, in pixels of the picture; ``log_x``: the first has the logarithms of its values."""

    width: int
    height: int
    x_range: Point
    y_range: Point
    log_x: bool = False
    top: int = TOP

    def x(self, value: float) -> float:
        low, high = map(log10, self.x_range) if self.log_x else self.x_range
        value = log10(value) if self.log_x else value
        return LEFT + (value - low) / ((high - low) or 1.0) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.height - BOTTOM - (value - low) / ((high - low) or 1.0) * (self.height - BOTTOM - self.top)

    def axes(self, x_name: str, y_name: str) -> str:
        """Draw the two axes, with their names, lines and numbers."""
        below, right, parts = self.height - BOTTOM, self.width - RIGHT, list[str]()
        for value in ticks(*self.y_range):
            at = self.y(value)
            parts += [
                element("line", class_="grid", x1=LEFT, x2=right, y1=at, y2=at),
                written(LEFT - 6, at + 4, shown(value), "end"),
            ]
        decades = [n * 10.0**power for power in range(-9, 19) for n in (1, 2, 5)] if self.log_x else []
        near = [value for value in decades if self.x_range[0] <= value <= self.x_range[1]]
        for value in near or ticks(*self.x_range, max(2, (self.width - LEFT) // 90)):
            at = self.x(value)
            parts += [
                element("line", class_="grid", x1=at, x2=at, y1=below, y2=below + 4),
                written(at, below + 17, shown(value), "middle"),
            ]
        parts.append(element("path", class_="axis", d=f"M{LEFT} {self.top}V{below}H{right}"))
        parts.append(written((LEFT + right) / 2, self.height - 6, x_name, "middle"))
        turned = f"rotate(-90 12 {(self.top + below) / 2:.1f})"
        return "".join([*parts, written(12, (self.top + below) / 2, y_name, "middle", transform=turned)])


def drawing(title: str, width: float, height: float, inside: str) -> str:
    """An SVG picture with a name for those who do not see it."""
    space = "http://www.w3.org/2000/svg"
    return element("svg", inside, xmlns=space, viewBox=f"0 0 {width:.0f} {height:.0f}", role="img", aria_label=title)


def written(x: float, y: float, words: str, anchor: str = "start", **more: object) -> str:
    """A line of text, which begins at x, ends there or has its middle there, as ``anchor`` says."""
    return element("text", escape(words), x=float(x), y=float(y), text_anchor=anchor, **more)


def title_of(words: str) -> str:
    """The element that a browser shows of a mark under the pointer."""
    return element("title", escape(words))


def _reach(values: Iterable[float], *, zero: bool = False) -> Point | None:
    """Return the range from the least to the most finite value, with some room; None of nothing. ``zero``: from 0."""
    finite = [value for value in values if isfinite(value)]
    if not finite:
        return None
    low, high = (min(0.0, *finite), max(finite)) if zero else (min(finite), max(finite))
    room = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    return (low if zero else low - room), high + room


def lines(
    title: str,
    names: tuple[str, str],
    series: Mapping[str, Sequence[Point]],
    odd: Mapping[str, Collection[float]] | None = None,
) -> Picture:
    """A line each, by the names of both axes; it is interrupted where a value is not finite. ``odd``: by series the x
    where values are not typical. Where these would flatten the rest, they are drawn at the edge, and told below."""
    width, height = 480, 250
    xs = [x for points in series.values() for x, _ in [*points[:1], *points[-1:]]]
    reach = _reach(y for points in series.values() for _, y in points)
    if reach is None:
        return Picture(
            title, drawing(f"{title}: nothing was measured", width, 60, written(LEFT, 34, "nothing was measured"))
        )
    low, high, beyond = *_typical(series, odd or {}, reach), list[str]()
    frame = Frame(width, height, (min(xs), max(xs)), (low, high))
    parts = [frame.axes(*names)]
    for number, (name, points) in enumerate(series.items()):
        of = f"{name}, " * (len(series) > 1)
        beyond += [f"{of}{names[0]} {shown(x)}: {shown(y)}" for x, y in points if isfinite(y) and not low <= y <= high]
        inside = [(x, min(max(y, low), high) if isfinite(y) else y) for x, y in points]
        parts += _line(frame, thinned(inside, width), colour(number))
    finite = [y for points in series.values() for _, y in points if isfinite(y)]
    said = f"{title}: {names[1]} by {names[0]}, from {shown(min(finite))} to {shown(max(finite))}"
    legend = [(f"line {kind}", name) for kind, name in colours(series)] if len(series) > 1 else []
    more = [f"and {len(beyond) - MOST_BEYOND} more"] * (len(beyond) > MOST_BEYOND)
    note = f"beyond what is drawn: {'; '.join([*beyond[:MOST_BEYOND], *more])}" if beyond else ""
    return Picture(title, drawing(said, width, height, "".join(parts)), legend, note)


def _typical(series: Mapping[str, Sequence[Point]], odd: Mapping[str, Collection[float]], reach: Point) -> Point:
    """The range of what is typical, if ``reach``, which is that of all, is ``FLAT`` times as long; else ``reach``."""
    found = _reach(y for name, points in series.items() for x, y in points if x not in odd.get(name, ()))
    return found if found and reach[1] - reach[0] > FLAT * (found[1] - found[0]) else reach


def _line(frame: Frame, points: Sequence[Point], kind: str) -> Iterator[str]:
    """Yield the marks of one line: of a finite value alone a dot."""
    for finite, run in groupby(points, key=lambda point: isfinite(point[1])):
        drawn = [(frame.x(x), frame.y(y)) for x, y in run] if finite else []
        if len(drawn) == 1:
            yield element("circle", class_=f"dot {kind}", cx=drawn[0][0], cy=drawn[0][1], r=3)
        elif drawn:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
            yield element("polyline", class_=f"line {kind}", points=path)


def small_curve(name: str, points: Sequence[Point], size: tuple[int, int] = (96, 24)) -> str:
    """A line without axes, for a row of a table; empty where nothing is finite."""
    width, height = size
    reach = _reach(y for _, y in points)
    if reach is None:
        return ""
    (low, high), (first, last) = reach, (points[0][0], points[-1][0])
    across, up = width / ((last - first) or 1.0), height / (high - low)
    drawn = []
    for run in (run for finite, run in groupby(points, key=lambda point: isfinite(point[1])) if finite):
        path = " ".join(f"{(x - first) * across:.1f},{(high - y) * up:.1f}" for x, y in run)
        drawn.append(element("polyline", class_=f"line {colour(0)}", points=path))
    values = [y for _, y in points if isfinite(y)]
    return drawing(f"{name}: from {shown(values[0])} to {shown(values[-1])}", width, height, "".join(drawn))


def scatter(
    title: str,
    names: tuple[str, str],
    marks: Sequence[Dot],
    limits: Mapping[str, float],
    legend: Sequence[tuple[str, str]],
) -> Picture:
    """Points, and vertical ``limits`` by their names; x as its logarithm where it spans more than a decade. Axes begin
    where points do. Points that would cover one another have one label."""
    width, height, top = WIDE, 380, TOP + LINE * len(limits)
    xs, ys = [*(mark.x for mark in marks), *limits.values()], [mark.y for mark in marks]
    far = min(xs, default=0.0) > 0 and max(xs) > 10 * min(xs)
    x_range = (0.8 * min(xs), 1.25 * max(xs)) if far else _reach(xs) or (0.0, 1.0)
    frame = Frame(width, height, x_range, _reach(ys) or (0.0, 1.0), far, top)
    parts = [frame.axes(names[0] + " (logarithmic)" * far, names[1])]
    parts += _limits({name: frame.x(value) for name, value in limits.items()}, width, height - BOTTOM)
    places = [(frame.x(mark.x), frame.y(mark.y)) for mark in marks]
    for mark, (x, y) in zip(marks, places, strict=True):
        parts.append(element("circle", title_of(mark.told), class_=f"point {mark.kind}", cx=x, cy=y, r=7))
    parts += _labels(frame, places, [mark.label for mark in marks])
    said = f"{title}: {len(marks)} points, {names[1]} by {names[0]}"
    return Picture(title, drawing(said, width, height, "".join(parts)), legend, wide=True)


def _limits(places: Mapping[str, float], width: int, below: float) -> Iterator[str]:
    """Vertical lines at these x, their names above the plot, a line of ``LINE`` pixels each, and all on the side where
    there is room: no line crosses a name."""
    right = sum(places.values()) > len(places) * width / 2
    for number, (name, at) in enumerate(sorted(places.items(), key=lambda one: one[1], reverse=right)):
        top = TOP + LINE * number
        yield element("line", class_="limit", x1=at, x2=at, y1=top - LINE + 2, y2=below)
        yield written(at + (-5 if right else 5), top - 2, name, "end" if right else "start", class_="note")


def _labels(frame: Frame, points: Sequence[Point], names: Sequence[str]) -> Iterator[str]:
    """The names of points beside them, one for all that nearly cover one another, where each covers the fewest
    others."""
    boxes = [(x - 8, y - 8, x + 8, y + 8) for x, y in points]
    groups: list[list[int]] = []
    for number, (x, y) in enumerate(points):
        near = (one for one in groups if all(abs(points[n][0] - x) < 14 > abs(points[n][1] - y) for n in one))
        if group := next(near, None):
            group.append(number)
        else:
            groups.append([number])
    for group in groups:
        words = ", ".join(names[n] for n in group)
        left, right = (pick(points[n][0] for n in group) for pick in (min, max))
        upper, lower = (pick(points[n][1] for n in group) for pick in (min, max))
        wide, middle = 8 * len(words), (upper + lower) / 2
        xs, ys = (right + 11, left - 11 - wide, (left + right - wide) / 2), (middle + 5, upper - 12, lower + 22)
        places = [(x, y - 11, x + wide, y + 3) for x, y in product(xs, ys)]
        chosen = min(places, key=lambda box: _covered(box, boxes) + 9 * (box != _inside(box, frame)))
        boxes.append(chosen)
        at, anchor = (chosen[0], "start") if chosen[0] > left else (chosen[2], "end")
        yield written(at, chosen[3] - 3, words, anchor, class_="name")


Box = tuple[float, float, float, float]


def _covered(box: Box, others: Sequence[Box]) -> int:
    """Return how many of ``others`` a box covers in part; each is its left, upper, right and lower edge."""
    return sum(a < box[2] and box[0] < c and b < box[3] and box[1] < d for a, b, c, d in others)


def _inside(box: Box, frame: Frame) -> Box:
    """Return the part of a box that is in the plot."""
    below, right = frame.height - BOTTOM, frame.width
    return max(box[0], LEFT), max(box[1], frame.top), min(box[2], right), min(box[3], below)


def bars(
    title: str,
    name: str,
    rows: Mapping[str, Mapping[str, float]],
    limits: Mapping[str, float],
    show: Callable[[float], str],
) -> Picture:
    """A stacked bar for each row, its parts by name; vertical ``limits``. Numbers are in the unit of ``name``."""
    width, left = WIDE, LEFT + 70
    parts_of = [*dict.fromkeys(part for row in rows.values() for part in row)]
    most = max([1e-9, *(sum(row.values()) for row in rows.values()), *limits.values()]) * 1.02
    scale, below = (width - left - RIGHT) / most, TOP + ROW * len(rows) + LINE * len(limits)
    drawn = []
    for value in ticks(0.0, most, 7):
        at = left + value * scale
        drawn += [
            element("line", class_="grid", x1=at, x2=at, y1=TOP + LINE * len(limits), y2=below),
            written(at, below + 16, shown(value), "middle"),
        ]
    for number, (label, row) in enumerate(rows.items()):
        at, top = float(left), TOP + LINE * len(limits) + ROW * number
        drawn.append(written(left - 6, top + ROW * 0.6, label, "end"))
        for part, size in ((part, size) for part, size in row.items() if size):
            told = title_of(f"{label}, {part}: {show(size)}")
            drawn.append(
                element(
                    "rect",
                    told,
                    class_=f"part {colour(parts_of.index(part))}",
                    x=at,
                    y=top,
                    width=size * scale,
                    height=ROW - 5,
                )
            )
            at += size * scale
    drawn += _limits({label: left + value * scale for label, value in limits.items()}, width, below)
    drawn.append(written((left + width) / 2, below + 34, name, "middle"))
    sums = "; ".join(f"{label} {show(sum(row.values()))}" for label, row in rows.items())
    return Picture(
        title, drawing(f"{title}: {sums}", width, below + 40, "".join(drawn)), _used(rows.values()), wide=True
    )


def areas(
    title: str, names: tuple[str, str], levels: Sequence[tuple[float, Mapping[str, float]]], limits: Mapping[str, float]
) -> Picture:
    """Stacked areas: at each x the parts by name. Of the levels in two pixels the highest is drawn."""
    width, height = WIDE, 360
    parts_of = [*dict.fromkeys(part for _, level in levels for part in level)]
    sums = [(x, sum(level.values())) for x, level in levels]
    frame = Frame(
        width,
        height,
        (levels[0][0], levels[-1][0]),
        _reach([*(y for _, y in sums), *limits.values()], zero=True) or (0.0, 1.0),
    )
    columns = [
        max(group, key=lambda one: sum(one[1].values()))
        for _, group in groupby(levels, key=lambda one: int(frame.x(one[0]) / 2))
    ]
    drawn, lower = [frame.axes(*names)], [0.0] * len(columns)
    for number, part in enumerate(parts_of):
        upper = [low + level.get(part, 0.0) for low, (_, level) in zip(lower, columns, strict=True)]
        edge = [(x, y) for (x, _), y in zip(columns, upper, strict=True)]
        edge += [(x, y) for (x, _), y in zip(reversed(columns), reversed(lower), strict=True)]
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in edge)
        if upper != lower:
            drawn.append(element("polygon", title_of(part), class_=f"part {colour(number)}", points=path))
        lower = upper
    for number, (label, value) in enumerate(limits.items()):
        at = frame.y(value)
        drawn.append(element("line", class_="limit", x1=LEFT, x2=width - RIGHT, y1=at, y2=at))
        drawn.append(written(width - RIGHT, at + (-5 if number else 15), label, "end", class_="note"))
    said = f"{title}: at most {shown(max(y for _, y in sums))}, {names[1]} by {names[0]}"
    return Picture(title, drawing(said, width, height, "".join(drawn)), _used(level for _, level in levels), wide=True)


def _used(stacks: Iterable[Mapping[str, float]]) -> list[tuple[str, str]]:
    """A legend of the parts that some stack has, in the colours that they have among all."""
    largest: dict[str, float] = {}
    for stack in stacks:
        largest |= {part: max(size, largest.get(part, 0.0)) for part, size in stack.items()}
    return [one for one, size in zip(colours(largest), largest.values(), strict=True) if size]
