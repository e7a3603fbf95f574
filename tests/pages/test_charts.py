"""Charts: what is drawn of many points, of none and of values that are not finite."""

from __future__ import annotations

from itertools import pairwise
from math import inf, isfinite, nan
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.pages.charts import Dot, Picture, areas, bars, lines, scatter, thinned, ticks
from shardwise.pages.page import Chapter, WebPage
from shardwise.pages.timelines import TimeBlock, cut_out, joined, timeline
from tests.pages.parsed import SVG, faults
from tests.said import shows

NAMES = ("step", "nats")


def drawn(picture: Picture) -> ElementTree.Element:
    assert faults(WebPage("A page", "", [Chapter("Pictures", [picture])]).html()) == []
    return ElementTree.fromstring(picture.svg)


def written(picture: Picture) -> list[str]:
    return [each.text or "" for each in drawn(picture).iter(f"{SVG}text")]


def test_thinning_keeps_the_extremes_of_each_pixel_and_the_ends() -> None:
    """A hundred thousand steps, one of which leaps, one of which falls: both are there, and few others."""
    points = [(float(step), 2.0 + step % 7 / 100) for step in range(100_000)]
    points[31_234], points[77_777] = (31_234.0, 900.0), (77_777.0, -5.0)
    kept = thinned(points, 480)
    assert len(kept) <= 4 * 481
    assert points[31_234] in kept and points[77_777] in kept
    assert kept[0] == points[0] and kept[-1] == points[-1] and kept == sorted(kept)
    lows, highs = (pick(y for _, y in kept[100:200]) for pick in (min, max))
    assert (lows, highs) == (2.0, 2.06)


def test_thinning_interrupts_where_a_whole_pixel_has_no_values() -> None:
    points = [(float(step), nan if 40_000 <= step < 60_000 else 1.0) for step in range(100_000)]
    kept = thinned(points, 100)
    assert any(not isfinite(y) for x, y in kept if 40_000 < x < 60_000)
    finite = [x for x, y in kept if y == 1.0]
    assert max(b - a for a, b in pairwise(finite)) > 19_000
    assert thinned(points[:50], 100) == points[:50]


def test_a_line_of_few_points_is_drawn_through_each() -> None:
    root = drawn(lines("Loss", NAMES, {"a": [(1, 2.0), (2, 1.0), (4, 0.5)], "b": [(1, 3.0), (2, 2.5)]}))
    paths = [each.get("points", "").split() for each in root.iter(f"{SVG}polyline")]
    assert [len(path) for path in paths] == [3, 2]
    xs, ys = zip(*(map(float, point.split(",")) for point in paths[0]), strict=True)
    assert (xs[2] - xs[1]) / (xs[1] - xs[0]) == pytest.approx(2, rel=0.01)
    assert (ys[1] - ys[0]) / (ys[2] - ys[1]) == pytest.approx(2, rel=0.02) and ys[0] < ys[1]


def test_a_line_is_interrupted_where_a_value_is_not_finite() -> None:
    points = [(1.0, 2.0), (2.0, 1.5), (3.0, nan), (4.0, inf), (5.0, 1.0), (6.0, 0.9), (7.0, nan), (8.0, 0.8)]
    root = drawn(lines("Loss", NAMES, {"run": points}))
    assert [len(each.get("points", "").split()) for each in root.iter(f"{SVG}polyline")] == [2, 2]
    assert len([*root.iter(f"{SVG}circle")]) == 1


@pytest.mark.parametrize("series", [{}, {"run": []}, {"run": [(1.0, nan)]}, {"run": [(1.0, nan), (2.0, inf)], "b": []}])
def test_nothing_is_said_to_be_nothing(series: dict[str, list[tuple[float, float]]]) -> None:
    picture = lines("Loss", NAMES, series)
    assert not [*drawn(picture).iter(f"{SVG}polyline")] and written(picture) == ["nothing was measured"]


@pytest.mark.parametrize("values", [[5.0], [5.0, 5.0], [0.0, 0.0], [-1e-9, 1e12], [1e-300, 2e-300]])
def test_one_value_and_extreme_ones_have_axes(values: list[float]) -> None:
    drawn(lines("Loss", NAMES, {"run": [(float(step), value) for step, value in enumerate(values)]}))


@given(st.floats(-1e12, 1e12), st.floats(1e-6, 1e12), st.integers(2, 9))
def test_ticks_are_round_and_lie_between_the_ends(least: float, length: float, count: int) -> None:
    found = ticks(least, least + length, count)
    assert 1 <= len(found) <= count + 2
    assert all(least - 1e-6 * length <= tick <= least + length * 1.000001 for tick in found) or length < 1e-9 * abs(
        least
    )


def test_axes_and_titles_are_named() -> None:
    picture = lines("Loss", NAMES, {"run": [(1.0, 2.0), (2.0, 1.0)]})
    assert {"step", "nats"} <= {*written(picture)}
    assert shows(drawn(picture).get("aria-label"), "Loss", "nats", "step", 1, 2)


def test_points_that_cover_one_another_share_a_label() -> None:
    marks = [
        Dot(10.0, 5.0, "1", "one", "good"),
        Dot(10.1, 5.0, "2", "two", "good"),
        Dot(60.0, 1.0, "3", "three", "bad"),
    ]
    picture = scatter("Plans", ("GiB", "seconds"), marks, {"80%": 64.0}, [("good", "fits")])
    assert {"1, 2", "3", "80%"} <= {*written(picture)}
    assert [each.text for each in drawn(picture).iter(f"{SVG}title")] == ["one", "two", "three"]


def test_points_far_apart_are_drawn_by_their_logarithms() -> None:
    marks = [Dot(x, 1.0, str(x), "", "good") for x in (1.0, 10.0, 1000.0)]
    picture = scatter("Plans", ("GiB", "seconds"), marks, {}, [])
    one, ten, thousand = (float(each.get("cx", "")) for each in drawn(picture).iter(f"{SVG}circle"))
    assert (thousand - ten) / (ten - one) == pytest.approx(2, rel=0.01)
    assert any("logarithmic" in words for words in written(picture))


Box = tuple[float, float, float, float]


def names_of(picture: Picture, kind: str) -> list[Box]:
    """Where the names of this class are, about, in pixels: left, upper, right, lower."""
    found = []
    for each in drawn(picture).iter(f"{SVG}text"):
        if each.get("class") == kind:
            wide, x, y = 7.0 * len(each.text or ""), float(each.get("x", "")), float(each.get("y", ""))
            left = x - wide if each.get("text-anchor") == "end" else x
            found.append((left, y - 10, left + wide, y + 2))
    return found


def collide(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def on_one_another(picture: Picture) -> int:
    """How many names lie on another one, on a point or on a limit."""
    root, names = drawn(picture), [*names_of(picture, "name"), *names_of(picture, "note")]
    marks = [(float(each.get("cx", "")), float(each.get("cy", ""))) for each in root.iter(f"{SVG}circle")]
    others = [*names, *((x - 6, y - 6, x + 6, y + 6) for x, y in marks)]
    for each in root.iter(f"{SVG}line"):
        if each.get("class") == "limit":
            x, top, below = (float(each.get(key, "")) for key in ("x1", "y1", "y2"))
            others.append((x, top, x, below))
    return sum(collide(name, other) for name in names for other in others if other is not name)


LIMITS = {"80%, to fit": 35.5, "all, 44.4 GiB": 44.4}


@pytest.mark.parametrize(
    ("places", "limits"),
    [
        ([(6.6, 0.50), (7.4, 0.59), (7.2, 0.52), (8.0, 0.63), (6.9, 0.56), (24.0, 1.34)], LIMITS),
        ([(125.0, 35.0)], {"80%, to fit": 18.9, "all, 23.6 GiB": 23.6}),
        ([(40.0, 0.5), (41.0, 0.51), (42.0, 0.5), (43.9, 0.5)], LIMITS),
        ([(100.0, 0.5), (99.4, 0.5), (98.8, 0.5), (99.4, 0.52), (1.0, 0.5)], {}),
        ([(1.0, 2.0), (1.0, 2.0)], {}),
    ],
)
def test_names_lie_on_nothing(places: list[tuple[float, float]], limits: dict[str, float]) -> None:
    marks = [Dot(x, y, f"{n}" + " (chosen)" * (n == 1), "", "good") for n, (x, y) in enumerate(places, 1)]
    assert on_one_another(scatter("Plans", ("GiB", "seconds"), marks, limits, [])) == 0


def test_names_of_limits_of_bars_lie_on_nothing() -> None:
    for limits in (LIMITS, {"80%, to fit": 3.0, "all, 4 GiB": 4.0}):
        assert on_one_another(bars("Memory", "GiB", {"a": {"weights": 40.0}}, limits, str)) == 0


def test_points_that_are_near_are_told_apart() -> None:
    """Neither axis need begin at nothing."""
    marks = [Dot(x, y, str(x), "", "good") for x, y in ((100.0, 0.546), (101.0, 0.550), (102.0, 0.554))]
    found = [*drawn(scatter("Plans", ("MiB", "seconds"), marks, {}, [])).iter(f"{SVG}circle")]
    for key, least in (("cx", 250), ("cy", 100)):
        places = sorted(float(each.get(key, "")) for each in found)
        assert min(b - a for a, b in pairwise(places)) > least, key


def test_parts_of_a_bar_are_as_long_as_they_are_much() -> None:
    rows = {"a": {"weights": 3.0, "moments": 0.0, "rest": 1.0}, "b": {"moments": 2.0}}
    root = drawn(bars("Memory", "GiB", rows, {"all": 5.0}, "{:g} GiB".format))
    parts = {(each.findtext(f"{SVG}title") or ""): float(each.get("width", "")) for each in root.iter(f"{SVG}rect")}
    assert [*parts] == ["a, weights: 3 GiB", "a, rest: 1 GiB", "b, moments: 2 GiB"]
    assert parts["a, weights: 3 GiB"] / parts["b, moments: 2 GiB"] == pytest.approx(1.5, rel=0.01)


def test_the_highest_of_levels_in_a_pixel_is_drawn() -> None:
    levels = [(float(x), {"a": 1.0, "b": 9.0 if x == 5_001 else 0.0}) for x in range(10_000)]
    root = drawn(areas("Memory", ("pass", "GiB"), levels, {}))
    _, upper = (each.get("points", "").split() for each in root.iter(f"{SVG}polygon"))
    heights = sorted(float(point.split(",")[1]) for point in upper)
    assert len(upper) < 2_000 and heights[1] - heights[0] > 100


def test_legends_name_what_is_drawn_in_the_colours_of_all() -> None:
    """Pictures of one page have the same colours, though a part may be in one of them only."""
    levels = [(0.0, {"weights": 1.0, "gathered": 0.0, "logits": 0.0}), (1.0, {"weights": 1.0, "logits": 2.0})]
    rows = {"a": {"weights": 1.0, "gathered": 0.0, "logits": 3.0}}
    for picture in (areas("Memory", ("pass", "GiB"), levels, {}), bars("Memory", "GiB", rows, {}, str)):
        assert picture.legend == [("c0", "weights"), ("c2", "logits")]
        marks = [each for kind in ("rect", "polygon") for each in drawn(picture).iter(f"{SVG}{kind}")]
        assert [each.get("class") for each in marks] == ["part c0", "part c2"]


def test_a_legend_of_lines_has_lines_as_they_are_drawn() -> None:
    """Whole or dashed, by the same classes."""
    points = [(1.0, 2.0), (2.0, 1.0)]
    picture = lines("Loss", NAMES, {"a": points, "b": points})
    assert {each.get("class") for each in drawn(picture).iter(f"{SVG}polyline")} == {kind for kind, _ in picture.legend}
    page = WebPage("A page", "", [Chapter("Pictures", [picture])]).html()
    legend = page.partition('<ul class="legend">')[2].partition("</ul>")[0]
    assert [legend.count(mark) for mark in ('<path class="line c0"', '<path class="line c1"', "<rect")] == [1, 1, 0]


def test_a_timeline_joins_what_is_too_narrow_and_keeps_the_rest() -> None:
    row = [TimeBlock(n / 10, (n + 1) / 10, "c0", f"block {n}") for n in range(1000)]
    assert [(one.begin_s, one.end_s) for one in joined(row, 1.0)] == [(0.0, 100.0)]
    assert joined(row, 0.05) == row
    mixed = [row[0], row[1]._replace(kind="c1"), row[2]]
    assert joined(mixed, 1.0) == mixed
    found = cut_out({"row": row}, 10.05, 10.25)["row"]
    assert [(round(one.begin_s, 6), round(one.end_s, 6)) for one in found] == [(0.0, 0.05), (0.05, 0.15), (0.15, 0.2)]


def test_a_timeline_names_what_is_grey() -> None:
    picture = timeline("A step", {"rank 0": [TimeBlock(0.0, 1.0, "c0", "")]}, [("c0", "forward")], "{:g} s".format)
    grey = {each.get("class") for each in drawn(picture).iter(f"{SVG}rect")} - {"block c0"}
    assert [name for class_, name in picture.legend if class_ in grey] == ["nothing"]


def test_a_timeline_of_very_many_blocks_stays_small() -> None:
    rows = {
        f"rank {r}": [TimeBlock(float(n), n + 1.0, f"c{n % 2}", f"block {n}") for n in range(800)] for r in range(32)
    }
    picture = timeline("A step", rows, [("c0", "forward")], "{:g} s".format)
    assert len(picture.svg) < 1_000_000 and len([*drawn(picture).iter(f"{SVG}path")]) == 64
    few = timeline("A step", {"rank 0": rows["rank 0"][:5]}, [], "{:g} s".format)
    assert shows([each.text for each in drawn(few).iter(f"{SVG}title")][1], "block 1", "1 s", "2 s")
