"""``shardwise compare``: how two runs differ, from the files in their directories."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from shardwise.cli.curves import KINDS, Curve, LoadMap, draw
from shardwise.cli.history import History, read_history
from shardwise.cli.options import Common, misused
from shardwise.cli.show import note, print_json, say, visible
from shardwise.errors import OutputError, Problem
from shardwise.spec.units import columns, show_bytes

OWN = {"run.name", "run.out", "format"}
"""Keys that name a run, and do not change what it computes."""
ROWS = 6
"""At how many common steps losses are shown."""


@dataclass
class Options(Common):
    """Compare two runs, finished or not: recipes, losses, validation, speed and memory."""

    run_a: Annotated[Path, Argument(metavar="RUN_A", help="A run's directory.")]
    run_b: Annotated[Path, Argument(metavar="RUN_B", help="Another run's directory.")]
    plot: Annotated[
        Path | None, Option("--plot", help="Draw both loss curves, and the loads of experts: a .svg, .png or .pdf.")
    ] = None


def run(options: Options) -> None:
    """Read both runs, and show them side by side."""
    if options.plot is not None and options.plot.suffix not in KINDS:
        what = f"a plot is one of {' '.join(KINDS)}, not `{options.plot.suffix or options.plot.name}`"
        raise misused(what, f"`--plot {options.plot.with_suffix('.svg')}`", "--plot")
    pair = (read_history(options.run_a), read_history(options.run_b))
    for line in [place for each in pair for place in each.unread]:
        note(f"warning[LOG001]: {line} cannot be read and is left out", as_json=options.json)
    if options.plot is not None:
        _write(options.plot, pair)
    if options.json:
        facts = [_facts(each) for each in pair]
        compared = {"runs": facts, "recipe": differences(*pair), "losses": common_losses(*pair)}
        print_json(compared | {"warnings": incomparable(*pair)})
        return
    say(*map(visible, _lines(*pair)))
    if options.plot is not None:
        say(f"\nwritten: {options.plot}")


def differences(a: History, b: History) -> dict[str, tuple[Any, Any]]:
    """The recipe keys whose values differ; a key that one run does not have is null there."""
    keys = sorted({*a.recipe, *b.recipe} - OWN)
    pairs = {key: (a.recipe.get(key), b.recipe.get(key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def incomparable(a: History, b: History) -> list[str]:
    """Why the two losses do not measure the same thing."""
    found = []
    methods = [str(each.recipe.get("method.name")) for each in (a, b)]
    if methods[0] != methods[1]:
        found.append(f"the losses are of different methods ({' and '.join(methods)}) and cannot be compared")
    one, two = a.identity, b.identity
    if not (one and two):  # of another version, or its file cannot be read, which is told
        return found
    if one.get("tokenizer") != two.get("tokenizer"):
        found.append("the tokenizers differ, so a token is not the same amount of text: compare bits per byte")
    elif one.get("data") != two.get("data"):
        found.append("the data differ, and perhaps the held-out data too: a loss also depends on how hard its data are")
    return found


def common_losses(a: History, b: History) -> list[tuple[int, float, float]]:
    """(step, loss, loss) at a few evenly spaced steps that both runs have, the last common one included."""
    steps = sorted({*a.losses} & {*b.losses})
    chosen = sorted({steps[-1 - round(n * (len(steps) - 1) / (ROWS - 1))] for n in range(ROWS)}) if steps else []
    return [(step, a.losses[step], b.losses[step]) for step in chosen]


def _facts(history: History) -> dict[str, Any]:
    best = min(history.losses.items(), key=itemgetter(1), default=None)
    last = history.validation[-1] if history.validation else None
    least = min((point for point in history.validation if math.isfinite(point[1])), key=itemgetter(1), default=None)
    return {
        "run": str(history.directory),
        "finished": history.finished,
        "steps": max(history.rows, default=0),
        "max_steps": history.recipe.get("train.max_steps"),
        "tokens": history.rows[max(history.rows)].get("tokens") if history.rows else 0,
        "ranks": history.ranks,
        "skipped_steps": sum(bool(row.get("skipped")) for row in history.rows.values()),
        "last_loss": history.losses[max(history.losses)] if history.losses else None,
        "best_loss": best and {"step": best[0], "loss": best[1]},
        "last_validation": last and {"step": last[0], history.measure: last[1] if math.isfinite(last[1]) else None},
        "best_validation": least and {"step": least[0], history.measure: least[1]},
        "tokens_per_s": history.typical("tokens_per_s"),
        "step_s": history.typical("seconds"),
        "mfu": history.typical("mfu"),
        "memory_bytes": history.highest("memory_bytes"),
        "measured": dict(history.report),
    }


def _lines(a: History, b: History) -> list[str]:
    one, two = _facts(a), _facts(b)
    rows: list[tuple[str, ...]] = [("", one["run"], two["run"], "B to A")]
    rows.append(("state", *("finished" if facts["finished"] else "not finished" for facts in (one, two)), ""))
    for label, key in (("ranks", "ranks"), ("steps", "steps"), ("tokens", "tokens"), ("skipped", "skipped_steps")):
        rows.append((label, *(_show(facts[key], ",") for facts in (one, two)), ""))
    rows.append(_row("last loss", one["last_loss"], two["last_loss"], ".4f"))
    for label in ("best loss", "last validation", "best validation"):
        found = [facts[label.replace(" ", "_")] for facts in (one, two)]
        pair = [tuple(point.values()) if point else None for point in found]
        shown = [f"{_show(point[1], '.4f')} (step {point[0]:,})" if point else "-" for point in pair]
        before, after = (point[1] if point else None for point in pair)
        rows.append((label, *shown, _change(before, after)))
    rows.append(_row("tokens/s", one["tokens_per_s"], two["tokens_per_s"], ",.0f"))
    rows.append(_row("step time, s", one["step_s"], two["step_s"], ".4f"))
    memory = [facts["memory_bytes"] for facts in (one, two)]
    rows.append(("memory of rank 0", *("-" if m is None else show_bytes(m) for m in memory), _change(*memory)))
    rows.append(("torch's share of it", *(facts["measured"].get("memory per rank", "-") for facts in (one, two)), ""))
    lines = [f"warning: {why}" for why in incomparable(a, b)] + columns(rows, "<>>>")
    if losses := common_losses(a, b):
        table = [("step", "A", "B", "B - A")]
        table += [(f"{step:,}", f"{x:.4f}", f"{y:.4f}", f"{y - x:+.4f}") for step, x, y in losses]
        lines += ["", "loss at common steps", *columns(table, ">>>>")]
    else:
        lines += ["", "no steps in common"]
    changed = [(key, _show(x), _show(y)) for key, (x, y) in differences(a, b).items()]
    lines += ["", *columns([("recipe", "A", "B"), *changed], "<<<")] if changed else ["", "the recipes are the same"]
    return lines


def _row(label: str, a: float | None, b: float | None, form: str) -> tuple[str, str, str, str]:
    return label, _show(a, form), _show(b, form), _change(a, b)


def _show(value: Any, form: str = "") -> str:
    return "-" if value is None else format(value, form) if form else str(value)


def _change(a: float | None, b: float | None) -> str:
    return "" if not a or b is None or not math.isfinite(b / a) else f"{100 * (b - a) / a:+.1f} %"


def _write(target: Path, pair: Sequence[History]) -> None:
    curves = [Curve(str(one.directory), sorted(one.losses.items()), one.validation) for one in pair]
    maps = [LoadMap(str(one.directory), one.fullest) for one in pair if one.fullest]
    try:
        draw(curves, target, maps)
    except OSError as error:
        what, fix = f"cannot write {target}: {error.strerror}", "`--plot` a file in a directory that can be written"
        raise OutputError(Problem("OUT002", what, "--plot", fix)) from None
