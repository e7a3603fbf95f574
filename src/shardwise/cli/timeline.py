"""A step of a pipeline as a drawing, in the terminal or as SVG: what each rank computes when, and where it idles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from shardwise.spec.units import show_seconds
from shardwise.techniques.pp.actions import Kind
from shardwise.techniques.pp.replay import Replay, Timed

NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
COLOURS: dict[Kind, str] = {"F": "#7fb2e5", "B": "#f2a65a", "I": "#f7d070", "W": "#8fce9b"}
IDLE, IDLE_COLOUR = "·", "#ececec"
LEAST_CELLS = 10
STEP, ROW, LEFT, RIGHT, DIGIT = 1000, 24, 70, 90, 7
"""Of the picture, in pixels: the length of the step, the height of a row, what stands left and right of the step, and
the width of a digit."""


def text(replay: Replay, width: int) -> list[str]:
    """A row a rank, in which each character is what most of its time goes to, and the rank's idle share; then what the
    characters mean, and the idle share of all ranks. Rows have ``width`` characters, or more if that is too few for a
    drawing."""
    digits = len(str(len(replay.computed) - 1))
    cells = max(LEAST_CELLS, width - len(f"rank {'':{digits}} ") - len("  idle 10%"))
    rows = [
        f"rank {rank:<{digits}} {''.join(_cells(computed, replay.makespan_s, cells))}  idle {share:3.0%}"
        for rank, (computed, share) in enumerate(zip(replay.computed, replay.idle_shares, strict=True))
    ]
    legend = [f"{kind} {NAMES[kind]}" for kind in _kinds(replay)]
    return [*rows, "  ".join([*legend, f"{IDLE} idle"]), overall(replay)]


def svg(replay: Replay) -> str:
    """A row a rank and a rectangle for each computation, with the number of its micro-batch where there is room; the
    later of a rank's stages are paler. Hovering over a rectangle tells its stage and times."""
    height = ROW * (len(replay.computed) + 3)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + STEP + RIGHT}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for rank, (computed, share) in enumerate(zip(replay.computed, replay.idle_shares, strict=True)):
        top = ROW * (rank + 0.5)
        lines += [
            _label(LEFT / 8, top, f"rank {rank}"),
            _rectangle(LEFT, top, STEP, IDLE_COLOUR),
            *_rectangles(computed, top, STEP / (replay.makespan_s or 1.0)),
            _label(LEFT + STEP + RIGHT / 8, top, f"idle {share:.0%}"),
        ]
    top = ROW * (len(replay.computed) + 0.75)
    legend = [*((COLOURS[kind], NAMES[kind]) for kind in _kinds(replay)), (IDLE_COLOUR, "idle")]
    for place, (colour, name) in enumerate(legend):
        left = LEFT + 140 * place
        lines += [_rectangle(left, top, ROW, colour), _label(left + 1.25 * ROW, top, name)]
    several = any(len({one.action.stage for one in computed}) > 1 for computed in replay.computed)
    notes = overall(replay) + ("; the paler, the later of a rank's stages" if several else "")
    return "\n".join([*lines, _label(LEFT, top + ROW, notes), "</svg>", ""])


def _kinds(replay: Replay) -> list[Kind]:
    """The kinds of computations that the step has, in the order of a legend."""
    found = {one.action.kind for computed in replay.computed for one in computed}
    return [kind for kind in NAMES if kind in found]


def overall(replay: Replay) -> str:
    """Tell in which part of the passes a rank computes nothing, on average."""
    return f"idle over all ranks: {replay.bubble:.1%} of {show_seconds(replay.makespan_s)}"


def _cells(computed: Iterable[Timed], makespan_s: float, cells: int) -> list[str]:
    """Equal parts of the step, each as the letter of what takes most of it, or as idle."""
    shares: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(cells)]
    for action, start_s, end_s in computed:
        start, end = start_s / makespan_s * cells, end_s / makespan_s * cells
        for cell in range(int(start), min(int(end) + 1, cells)):
            shares[cell][action.kind] += min(end, cell + 1) - max(start, cell)
    for share in shares:
        share[IDLE] = 1.0 - sum(share.values())
    return [max(share, key=lambda kind: share[kind]) for share in shares]


def _rectangles(computed: Sequence[Timed], top: float, pixels_per_s: float) -> list[str]:
    stages = sorted({one.action.stage for one in computed})
    lines = []
    for action, start_s, end_s in computed:
        left, length = LEFT + start_s * pixels_per_s, (end_s - start_s) * pixels_per_s
        opacity = 1 - 0.6 * stages.index(action.stage) / len(stages)
        title = f"{NAMES[action.kind]} of micro-batch {action.micro}, stage {action.stage}"
        times = f"{show_seconds(start_s)} to {show_seconds(end_s)}"
        lines.append(_rectangle(left, top, length, COLOURS[action.kind], opacity, f"{title}: {times}"))
        if length >= DIGIT * (len(str(action.micro)) + 0.5):
            lines.append(_label(left + length / 2, top, str(action.micro), "middle"))
    return lines


def _rectangle(left: float, top: float, length: float, colour: str, opacity: float = 1.0, title: str = "") -> str:
    size = f'x="{left:.1f}" y="{top:.1f}" width="{length:.1f}" height="{ROW - 4}"'
    title = f"<title>{title}</title>" if title else ""
    return f'<rect {size} fill="{colour}" fill-opacity="{opacity:.2f}" stroke="white">{title}</rect>'


def _label(left: float, top: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{left:.1f}" y="{top + ROW * 0.6:.1f}" text-anchor="{anchor}">{words}</text>'
