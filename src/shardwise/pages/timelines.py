"""Timelines as SVG: rows of blocks of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import NamedTuple

from shardwise.pages.charts import RIGHT, ROW, TOP, WIDE, Picture, drawing, element, ticks, title_of, written

MOST_TOLD = 3_000
"""A timeline of more blocks has one path for all of a kind in a row, and does not tell of each."""


class TimeBlock(NamedTuple):
    """A part of a row of a timeline, in seconds; ``kind`` names its colour."""

    begin_s: float
    end_s: float
    kind: str
    told: str


def timeline(
    title: str, rows: Mapping[str, Sequence[TimeBlock]], kinds: Sequence[tuple[str, str]], show: Callable[[float], str]
) -> Picture:
    """A row each, and a rectangle for each of its blocks; ``kinds``: their names by class. Blocks of one kind that
    touch, and are too narrow to be seen alone, are one."""
    width, left = WIDE, 120
    most = max([1e-12, *(block.end_s for row in rows.values() for block in row)])
    scale, drawn = (width - left - RIGHT) / most, list[str]()
    below = TOP + ROW * len(rows)
    for value in ticks(0.0, most, 8):
        at = left + value * scale
        drawn += [
            element("line", class_="grid", x1=at, x2=at, y1=TOP, y2=below),
            written(at, below + 16, show(value), "middle"),
        ]
    several = {label: joined(row, 1.0 / scale) for label, row in rows.items()}
    many = sum(map(len, several.values())) > MOST_TOLD
    for number, (label, row) in enumerate(several.items()):
        top = TOP + ROW * number
        drawn.append(written(left - 8, top + ROW * 0.6, label, "end"))
        drawn.append(element("rect", class_="idle", x=left, y=top, width=most * scale, height=ROW - 5))
        places = [
            (block, left + block.begin_s * scale, max(0.3, (block.end_s - block.begin_s) * scale)) for block in row
        ]
        for kind in dict.fromkeys(block.kind for block in row) if many else ():
            path = "".join(
                f"M{x:.1f} {top}h{w:.1f}v{ROW - 5}h-{w:.1f}z" for block, x, w in places if block.kind == kind
            )
            drawn.append(element("path", class_=f"block {kind}", d=path))
        for block, x, wide in () if many else places:
            told = title_of(f"{block.told}: {show(block.begin_s)} to {show(block.end_s)}")
            drawn.append(element("rect", told, class_=f"block {block.kind}", x=x, y=top, width=wide, height=ROW - 5))
    return Picture(
        title,
        drawing(f"{title}: {len(rows)} rows, {show(most)}", width, below + 24, "".join(drawn)),
        [*kinds, ("idle", "nothing")],
        wide=True,
    )


def cut_out(rows: Mapping[str, Sequence[TimeBlock]], begin_s: float, end_s: float) -> dict[str, list[TimeBlock]]:
    """Return the part of the rows between two moments, of which the first becomes 0."""
    found = dict[str, list[TimeBlock]]()
    for name, row in rows.items():
        inside = [block for block in row if block.end_s > begin_s and block.begin_s < end_s]
        found[name] = [
            block._replace(begin_s=max(block.begin_s, begin_s) - begin_s, end_s=min(block.end_s, end_s) - begin_s)
            for block in inside
        ]
    return found


def joined(row: Sequence[TimeBlock], least_s: float) -> list[TimeBlock]:
    """The blocks of a row, with those joined that are of one kind, shorter than ``least_s`` and as near."""
    found: list[TimeBlock] = []
    for block in row:
        last = found[-1] if found else TimeBlock(0.0, nan, "", "")
        short = block.end_s - block.begin_s < least_s
        if found and short and last.kind == block.kind and block.begin_s - last.end_s < least_s:
            told = last.told if last.told == block.told or last.told.endswith("...") else f"{last.told} ..."
            found[-1] = TimeBlock(last.begin_s, block.end_s, last.kind, told)
        else:
            found.append(block)
    return found
