"""``shardwise compare``: how runs differ, from the files in their directories."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from shardwise.cli.options import Common, misused
from shardwise.cli.out_file import check_page, write_out
from shardwise.cli.show import note, print_json, say, visible
from shardwise.data.remote import all_shown
from shardwise.pages.page import Chapter, Paragraphs, Part, Table, WebPage
from shardwise.runtime.report.curves import curves, events
from shardwise.runtime.report.run_files import History, read_history
from shardwise.spec.units import columns, counted, show_bytes, show_seconds

OWN = {"run.name", "run.out", "format"}
"""Keys that name a run, and do not change what it computes."""
ROWS = 6
"""At how many common steps losses are shown."""
SORTS = ("loss", "validation", "speed")


@dataclass
class Options(Common):
    """Compare runs, finished or not: two side by side, or a sweep in a table.

    What is compared: recipes, losses, validation, speed and memory.

    Two runs are shown side by side; of more (a sweep) each has a line, with the settings that differ. Of one run, also
    while it goes on, --html draws a page.
    """

    runs: Annotated[list[Path], Argument(metavar="RUN RUN ...", help="The runs' directories.", show_default=False)]
    sort: Annotated[
        str | None, Option("--sort", help="The best first, by its last loss, its best validation or its speed.")
    ] = None
    html: Annotated[
        Path | None, Option("--html", help="Write the curves and the tables into this HTML file.", metavar="FILE")
    ] = None


def run(options: Options) -> None:
    """Read the runs, and show them side by side."""
    if options.sort not in (None, *SORTS):
        raise misused(f"runs cannot be sorted by `{options.sort}`", f"one of {', '.join(SORTS)}", "--sort")
    _check_runs(options)
    if options.html:
        check_page(options.html, "--html", "comparison")
    runs = _sorted([read_history(directory) for directory in options.runs], options.sort)
    for line in [place for each in runs for place in each.unread]:
        note(f"warning[LOG001]: {line} cannot be read and is left out", as_json=options.json)
    if options.html:
        write_out(options.html, _page(runs).html(), "--html")
        note(f"written: {options.html}", as_json=options.json)
    if options.json:
        facts = [_facts(each) for each in runs]
        compared = {"runs": facts, "recipe": differences(*runs), "losses": common_losses(*runs)}
        print_json(compared | {"warnings": incomparable(*runs)})
        return
    say(
        *map(
            visible, _lines(*runs) if len(runs) == 2 else _table(runs) if len(runs) > 2 else columns(_one(*runs), "<>")
        )
    )


def _check_runs(options: Options) -> None:
    """Raises CLI001 for one run alone, unless its page is asked for, and for one that is named twice."""
    if len(options.runs) < 2 and not options.html:
        fix = f"`shardwise compare {options.runs[0]} OTHER_RUN`, or `--html FILE` for a page of this one"
        raise misused("one run alone cannot be compared", fix, "RUN")
    twice = [run for run, count in Counter(path.resolve() for path in options.runs).items() if count > 1]
    if twice:
        raise misused(f"{twice[0]} is named twice", "name each run once", "RUN")


def _sorted(runs: list[History], word: str | None) -> list[History]:
    """The runs as they were named, or the best first; those that have nothing to be sorted by come last."""

    def rank(run: History) -> float:
        facts = _facts(run)
        if word == "speed":
            return -(facts["tokens_per_s"] or -math.inf)
        found = facts["last_loss"] if word == "loss" else _measured(facts["best_validation"])
        return math.inf if found is None else float(found)

    return sorted(runs, key=rank) if word else runs


def differences(*runs: History) -> dict[str, tuple[Any, ...]]:
    """Return the recipe keys whose values differ, with each run's value, without what may be secret in URLs; a key that
    a run does not have is null there."""
    keys = sorted({key for each in runs for key in each.recipe} - OWN)
    values = {key: tuple(each.recipe.get(key) for each in runs) for key in keys}
    differ = {key: found for key, found in values.items() if any(value != found[0] for value in found)}
    return {key: tuple(map(all_shown, found)) for key, found in differ.items()}


def incomparable(*runs: History) -> list[str]:
    """Why the losses do not measure the same thing."""
    found = []
    methods = dict.fromkeys(str(each.recipe.get("method.name")) for each in runs)
    if len(methods) > 1:
        found.append(f"the losses are of different methods ({' and '.join(methods)}) and cannot be compared")
    known = [each.identity for each in runs if each.identity]  # else of another version, or unread, which is told
    if any(one.get("tokenizer") != known[0].get("tokenizer") for one in known):
        found.append("the tokenizers differ, so a token is not the same amount of text: compare bits per byte")
    elif any(one.get("data") != known[0].get("data") for one in known):
        found.append("the data differ, and perhaps the held-out data too: a loss also depends on how hard its data are")
    return found


def common_losses(*runs: History) -> list[tuple[float, ...]]:
    """(step, loss, loss, ...) at a few evenly spaced steps that all runs have, the last common one included."""
    steps = sorted(set[int].intersection(*({*each.losses} for each in runs)))
    chosen = sorted({steps[-1 - round(n * (len(steps) - 1) / (ROWS - 1))] for n in range(ROWS)}) if steps else []
    return [(step, *(each.losses[step] for each in runs)) for step in chosen]


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
        "trained_s": math.fsum(row["seconds"] for row in history.rows.values() if row.get("seconds") is not None),
        "mfu": history.typical("mfu"),
        "memory_bytes": history.highest("memory_bytes"),
        "measured": dict(history.report),
    }


def _lines(a: History, b: History) -> list[str]:
    lines = [f"warning: {why}" for why in incomparable(a, b)] + columns(_pair(a, b), "<>>>")
    if losses := _common(a, b):
        lines += ["", "loss at common steps", *columns(losses, ">>>>")]
    else:
        lines += ["", "no steps in common"]
    changed = [(key, _show(x), _show(y)) for key, (x, y) in differences(a, b).items()]
    lines += ["", *columns([("recipe", "A", "B"), *changed], "<<<")] if changed else ["", "the recipes are the same"]
    return lines


def _common(a: History, b: History) -> list[tuple[str, ...]]:
    """A head, and a row for each common step whose losses are shown; nothing where there is none."""
    rows = [(f"{step:,}", f"{x:.4f}", f"{y:.4f}", f"{y - x:+.4f}") for step, x, y in common_losses(a, b)]
    return [("step", "A", "B", "B - A"), *rows] if rows else []


def _pair(a: History, b: History) -> list[tuple[str, ...]]:
    """A head, and a row for each fact of two runs."""
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
    return rows


def _one(run: History) -> list[tuple[str, ...]]:
    """A head, and a row for each fact of a run."""
    return [(label, value) for label, value, *_ in _pair(run, run)]


def _page_of_one(run: History) -> WebPage:
    """Return the page of what a run's files tell so far: of one that goes on, or was killed, there is no report."""
    facts, (head, *rows) = _facts(run), _one(run)
    sections = [
        Chapter("Curves", curves({"run": run})),
        Chapter("Figures", [Table(head, rows, "<>")]),
        Chapter("Starts, faults and what was skipped", events(run)),
    ]
    return WebPage(
        f"Run {run.directory.name}",
        f"{facts['steps']:,} steps, {'finished' if facts['finished'] else 'not finished'}",
        sections,
        kind="comparison",
    )


def _page(runs: Sequence[History]) -> WebPage:
    """The curves of all runs in the same plots, and the tables of the text."""
    if len(runs) == 1:
        return _page_of_one(*runs)
    two = len(runs) == 2
    names = {f"{chr(65 + n)}: {each.directory}" if two else str(each.directory): each for n, each in enumerate(runs)}
    tables: list[Part] = []
    if two:
        titles = ("", "Loss at common steps")
        found = zip(titles, (_pair(*runs), _common(*runs)), strict=True)
        tables += [Table(rows[0], rows[1:], "<>>>", title) for title, rows in found if rows]
    else:
        head, *rows = _rows(runs)
        tables.append(Table(head, rows, "<" + ">" * (len(head) - 1)))
    changed = [(key, *map(_show, values)) for key, values in differences(*runs).items()]
    recipes: Part = Paragraphs(["the recipes are the same"])
    if changed:
        recipes = Table(("recipe", *names), changed, "<" * (1 + len(runs)))
    sections = [Chapter("Curves", curves(names)), Chapter("Figures", tables), Chapter("Recipes", [recipes])]
    warnings = [f"warning: {why}" for why in incomparable(*runs)]
    said = " and ".join(names) if two else counted(len(runs), "run")
    return WebPage("Runs compared", said, sections, facts=warnings, kind="comparison")


def _table(runs: Sequence[History]) -> list[str]:
    """Return a line for each run."""
    rows = _rows(runs)
    lines = [f"warning: {why}" for why in incomparable(*runs)] + columns(rows, "<" + ">" * (len(rows[0]) - 1))
    return lines if differences(*runs) else [*lines, "", "the recipes are the same"]


def _rows(runs: Sequence[History]) -> list[tuple[str, ...]]:
    """Return a head, and for each run the settings in which they differ, what it reached, and how fast."""
    changed, common = differences(*runs), common_losses(*runs)
    longest = {max(history.losses, default=0) for history in runs}
    uneven = [(f"loss at {common[-1][0]:,}", *common[-1][1:])] if common and len(longest) > 1 else []
    settings = [(key, *values) for key, values in changed.items()]
    reached = ("steps", "last loss", "best validation", "step time", "trained", "tokens/s", "memory")
    rows = [("run", *(key for key, *_ in settings), *(head for head, *_ in uneven), *reached)]
    for number, history in enumerate(runs):
        facts = _facts(history)
        rows.append(
            (
                facts["run"],
                *(_show(values[number]) for _, *values in settings),
                *(_show(losses[number], ".4f") for _, *losses in uneven),
                f"{facts['steps']:,}" + ("" if facts["finished"] else ", not finished"),
                _show(facts["last_loss"], ".4f"),
                _show(_measured(facts["best_validation"]), ".4f"),
                "-" if facts["step_s"] is None else show_seconds(facts["step_s"]),
                str(timedelta(seconds=round(facts["trained_s"]))),
                _show(facts["tokens_per_s"], ",.0f"),
                "-" if facts["memory_bytes"] is None else show_bytes(facts["memory_bytes"]),
            )
        )
    return rows


def _measured(point: dict[str, Any] | None) -> float | None:
    """The value of a validation, whose key names the measure."""
    return None if point is None else [*point.values()][1]


def _row(label: str, a: float | None, b: float | None, form: str) -> tuple[str, str, str, str]:
    return label, _show(a, form), _show(b, form), _change(a, b)


def _show(value: Any, form: str = "") -> str:
    return "-" if value is None else format(value, form) if form else str(value)


def _change(a: float | None, b: float | None) -> str:
    return "" if not a or b is None or not math.isfinite(b / a) else f"{100 * (b - a) / a:+.1f} %"
