"""The drawings of a pipeline's step."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from shardwise.cli.timeline import svg, text
from shardwise.techniques.pp.actions import Action, actions
from shardwise.techniques.pp.replay import Replay
from tests.said import shows
from tests.techniques.pp.replays import replay


def done(schedule: str, ranks: int, count: int, many: int) -> Replay:
    def seconds(action: Action) -> float:
        return (2 if action.kind == "B" else 1) / count

    return replay(actions(schedule, ranks, count, many), seconds)


def test_the_drawing_in_a_terminal() -> None:
    """A character a second."""
    *rows, legend, overall = text(done("1f1b", 2, 1, 4), 7 + 15 + 10)
    assert rows == ["rank 0 FF··BBFBBFBB·BB  idle 20%", "rank 1 ·FBBFBBFBBFBB··  idle 20%"]
    assert re.findall(r"(\S) (\w+)", legend) == [("F", "forward"), ("B", "backward"), ("·", "idle")]
    assert shows(overall, "all ranks", "20.0%", "15.0 s")


@pytest.mark.parametrize(("schedule", "count"), [("interleaved_zb", 1), ("zbv", 2), ("dualpipev", 2)])
@pytest.mark.parametrize("width", [40, 80, 133])
def test_rows_are_as_wide_as_asked(schedule: str, count: int, width: int) -> None:
    replayed = done(schedule, 12, count, 24)
    *rows, legend, overall = text(replayed, width)
    assert {len(row) for row in rows} == {width}
    assert [row[:8] for row in rows] == [f"rank {rank:<2} " for rank in range(12)]
    assert shows(legend, "F", "B", "I", "W", "·")
    assert shows(overall, "all ranks", f"{replayed.bubble:.1%}")


def test_a_character_is_what_most_of_its_time_goes_to() -> None:
    fine, coarse = (text(done("gpipe", 4, 1, 64), width)[0] for width in (1000, 60))
    for kind in "FB·":
        assert coarse.count(kind) / coarse.count("F") == pytest.approx(fine.count(kind) / fine.count("F"), rel=0.2)


def test_a_terminal_that_is_too_narrow_gets_a_small_drawing() -> None:
    assert len(text(done("gpipe", 2, 1, 2), 3)[0]) == len("rank 0 ") + 10 + len("  idle 33%")


def test_the_picture() -> None:
    replayed = done("zbv", 4, 2, 8)
    root = ElementTree.fromstring(svg(replayed))
    space = "{http://www.w3.org/2000/svg}"
    told = [title.text or "" for title in root.iter(f"{space}title")]
    assert len(told) == sum(map(len, replayed.computed))
    assert shows(told, "forward", "micro-batch 0", "stage 3", "1.50 s", "2.00 s")
    words = [label.text for label in root.iter(f"{space}text")]
    for expected in ("rank 0", "rank 3", "idle 6%", "forward", "input gradient", "weight gradient", "idle"):
        assert expected in words
    assert words.count("7") == sum(one.action.micro == 7 for computed in replayed.computed for one in computed)
    right = max(float(one.get("x", 0)) + float(one.get("width", "0").rstrip("%")) for one in root.iter(f"{space}rect"))
    assert right <= float(root.get("width", 0))


def test_micro_batches_have_no_number_where_there_is_no_room() -> None:
    words = svg(done("1f1b", 2, 1, 500))
    assert words.count("<title>") == 2000 and ">499</text>" not in words
