"""The answers to questions around a plan, in words and for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from math import isfinite
from typing import Annotated, Any

from typer import Option

from shardwise.cli.deadline import PAYS, Curve, curve, meets
from shardwise.cli.length import length_head, show_dollars, show_duration, show_hours
from shardwise.cli.options import misused
from shardwise.cli.questions import (
    MOST_GPUS,
    Asking,
    LeastMachines,
    PlanRow,
    apart,
    beside,
    compared,
    freed,
    least_of,
    per_token,
    smallest,
    swept,
)
from shardwise.cli.render import COLOURS
from shardwise.cli.show import coloured
from shardwise.cli.why_not import PlanPair
from shardwise.planner.comparison import MARGIN, TIE, seconds, tokens_per_s
from shardwise.planner.length import Length
from shardwise.spec.cluster import Cluster
from shardwise.spec.explain import fit, label
from shardwise.spec.plan import Plan
from shardwise.spec.units import columns, counted, show_bytes, show_count, show_seconds

PANEL = "Questions around the plan, one at a time"
FIGURES: dict[str, tuple[str, Callable[[float], str], str]] = {
    "seconds": ("the run", show_duration, "the fastest"),
    "gpu_hours": ("GPU-hours", show_hours, "the fewest GPU-hours"),
    "dollars": ("cost", show_dollars, "the cheapest"),
}
"""Figures of a run: the head of their column, how they are shown, and what the row is called that has least a token."""


@dataclass(kw_only=True)
class Questions:
    """The options that ask something around the plan."""

    compare: Annotated[
        str | None,
        Option("--compare", metavar="MACHINES", help="Machines, with commas between.", rich_help_panel=PANEL),
    ] = None
    smallest: Annotated[
        bool, Option("--smallest", help="The least that holds it, GPU by GPU.", rich_help_panel=PANEL)
    ] = False
    why_not: Annotated[
        list[str],
        Option(
            "--why-not", metavar="KEY=VALUE", help="The best plan with it, beside the chosen.", rich_help_panel=PANEL
        ),
    ] = field(default_factory=list)
    pins: Annotated[
        bool, Option("--pins", help="What each setting that the recipe pins costs.", rich_help_panel=PANEL)
    ] = False
    sweep: Annotated[
        str | None,
        Option("--sweep", metavar="KEY=VALUES", help="train.seq_len=4k..128k doubles.", rich_help_panel=PANEL),
    ] = None
    deadline: Annotated[
        str | None,
        Option("--deadline", metavar="TIME", help="The fewest GPUs, and the cheapest: 14d.", rich_help_panel=PANEL),
    ] = None
    budget: Annotated[
        str | None, Option("--budget", metavar="DOLLARS", help="With --deadline: 50k.", rich_help_panel=PANEL)
    ] = None


@dataclass(frozen=True)
class Reply:
    """An answer in ``lines``, and as an object for programs."""

    lines: list[str]
    found: dict[str, Any]


def answered(asked: Questions, about: Asking, page: list[str]) -> Reply | None:
    """Return the answer to what is asked; None where nothing is. ``page``: flags that are given, of what is told or
    written of one plan. Raises what a plan raises, and UsageError (CLI001)."""
    ways: dict[str, Callable[[], Reply]] = {
        "compare": lambda: _compared(compared(about, asked.compare or "")),
        "smallest": lambda: _smallest(smallest(about)),
        "pins": lambda: _freed(freed(about)),
        "sweep": lambda: _swept(swept(about, asked.sweep or "")),
        "deadline": lambda: _in_time(curve(about, asked.deadline or "", asked.budget)),
        "why_not": lambda: _why_not(*beside(about, asked.why_not)),
    }
    given = [name for name in ways if vars(asked)[name] not in (None, False, [])]
    if asked.budget is not None and asked.deadline is None:
        raise misused("`--budget` goes with `--deadline`", "--deadline 14d", "--budget")
    if not given:
        return None
    first, *others = [*(f"--{name.replace('_', '-')}" for name in given), *page]
    if others:
        raise misused(f"`{first}` is a question of its own, and `{others[0]}` is another", "leave out one", others[0])
    answer = ways[given[0]]()
    return Reply(answer.lines, {"question": given[0], **answer.found})


def _compared(rows: list[PlanRow]) -> Reply:
    found = {what: least for what in FIGURES if (least := least_of(rows, what))}
    told = list[str]()
    for what, (best, ties) in found.items():
        doubt = f"; the bands cannot tell it from {', '.join(row.name for row in ties)}" if ties else ""
        unknown = any(row.runs and not isfinite(per_token(row, what)) for row in rows)
        told.append(f"{FIGURES[what][2]}{' with a price' * unknown * (what == 'dollars')}: {best.name}{doubt}")
    pairs = {what: [pair for pair in combinations(rows, 2) if not apart(*pair, what)] for what in found}
    ties_of = {what: [[one.name, other.name] for one, other in pairs[what]] for what in found}
    best_of = {what: best.name for what, (best, _) in found.items()}
    lines = [*row_lines(rows, "machines"), *told]
    return Reply(lines, {"rows": [row.as_json() for row in rows], "least": best_of, "ties": ties_of})


def _smallest(found: list[LeastMachines]) -> Reply:
    variants = list(found[0].machines)
    heads = ["as it is", *(f"with {chr(ord('a') + number)}" for number in range(len(variants) - 1))]
    table = [("GPUs", "GiB each", *heads)]
    rows = list[dict[str, Any]]()
    for least in found:
        memory = least.cluster.device.memory_bytes
        sizes = [_size(one) for one in least.machines.values()]
        table.append((", ".join(least.devices), f"{memory / 2**30:.1f}", *sizes))
        counts = ("nodes", "devices_per_node")
        machines = {key: one and {name: vars(one)[name] for name in counts} for key, one in least.machines.items()}
        rows.append({"devices": least.devices, "memory_bytes": memory, "machines": machines})
    keys = [f"  {head.removeprefix('with ')}  {words}" for head, words in zip(heads[1:], variants[1:], strict=True)]
    lines = [f"the least machines that hold it below {MARGIN:.0%} of the memory: GPUs, or nodes x GPUs", ""]
    lines += [*columns(table, "<" + ">" * (len(heads) + 1)), "", *keys]
    lines += [f"-  none of up to {MOST_GPUS:,} GPUs, or the recipe asks for what the GPU does not have"] * any(
        "-" in row[2:] for row in table
    )
    return Reply(lines, {"rows": rows})


def _size(machines: Cluster | None) -> str:
    if machines is None:
        return "-"
    return str(machines.world) if machines.nodes == 1 else f"{machines.nodes}x{machines.devices_per_node}"


def _why_not(chosen: PlanRow, other: PlanRow) -> Reply:
    found: dict[str, Any] = {"rows": [chosen.as_json(), other.as_json()]}
    if other.plan is None:
        return Reply([f"with {other.name} it is refused", "", *map(str, other.refused)], found)
    assert chosen.plan is not None
    told = PlanPair(chosen.plan, other.plan)
    lines = [*row_lines([chosen, other], "plan", marked=False), *told.words(other.name)]
    return Reply(lines, found | {"same": told.same, **told.differences})


def _freed(rows: list[PlanRow]) -> Reply:
    now, *without = rows
    saved = {row.name: _saved(now, row) for row in without}
    told = list[str]()
    for row in (row for row in without if row.plan and row.fits):
        if not now.fits:
            told.append(f"{row.name} it fits")
        elif (share := saved[row.name] or 0) > TIE:
            told.append(f"{row.name} a token takes {share:.0%} less time")
    none = f"no pin costs more than {TIE:.0%} of the time, as runs of one plan differ"
    figures = {"rows": [row.as_json() for row in rows], "saved": saved}
    return Reply([*row_lines(rows, "", marked=False), *(told or [none])], figures)


def _saved(now: PlanRow, other: PlanRow) -> float | None:
    """The share of the time of a token that ``other`` saves, less than 0 where it is slower; None without two plans
    that fit."""
    if not (now.plan and other.plan and now.fits and other.fits):
        return None
    return 1 - tokens_per_s(now.plan) / tokens_per_s(other.plan)


def _swept(rows: list[PlanRow]) -> Reply:
    planned = [row for row in rows if row.plan]
    borders = [(one, other) for one, other in pairwise(planned) if one.fits is not other.fits]
    told = [
        f"it {'stops' if one.fits else 'begins'} to fit between {one.name} and {other.name}" for one, other in borders
    ]
    if not borders:
        told = [f"it fits with {'each' if planned[0].fits else 'none'} of these values"]
    found = [[one.name, other.name] for one, other in borders]
    return Reply([*row_lines(rows, "", marked=False), *told], {"rows": [r.as_json() for r in rows], "borders": found})


def _in_time(found: Curve) -> Reply:
    fewest = found.meeting[0] if found.meeting else None
    cheapest = least[0] if (least := least_of(found.meeting, "gpu_hours")) else None
    told, notes = list[str](), dict[str, str]()
    for row in found.rows:
        pays = f"{found.pays[row.name]:.0%}" if row.name in found.pays else "-"
        notes[row.name] = pays if meets(row, found.deadline_s) else "too late" * row.runs
    wanted = show_duration(found.deadline_s)
    if fewest and cheapest:
        sure = f"in {wanted} at the slow end of the band too: {found.surely[0].name}" if found.surely else ""
        told += [f"the fewest GPUs that do it in {wanted}: {_priced(fewest)}", f"the cheapest: {_priced(cheapest)}"]
        told += [sure or f"at the slow end of the band none of these does it in {wanted}"]
        *_, before, last = [None, *(row for row in found.rows if row.plan)]
        if before and last and found.pays.get(last.name, 1.0) < PAYS:
            told.append(f"beyond {before.name} another node adds less than {PAYS:.0%} of its share")
    else:
        told.append(
            f"none of up to {found.rows[-1].cluster.world:,} GPUs do it in {wanted}: more add little, or have no plan"
        )
    if found.budget is not None and fewest:
        within = [row.name for row in found.affordable]
        told.append(f"within {show_dollars(found.budget)}: {', '.join(within) or 'none of these'}")
    rows = [row.as_json() | {"meets": row in found.meeting, "pays": found.pays.get(row.name)} for row in found.rows]
    names = {"fewest": fewest and fewest.name, "cheapest": cheapest and cheapest.name}
    names["sure"] = found.surely[0].name if found.surely else None
    figures = {"deadline_s": found.deadline_s, "budget": found.budget, "rows": rows, **names}
    none = [row for row in found.rows if not row.plan]
    others = f" and {counted(len(none) - 1, 'other size')}" if none[1:] else ""
    told += [f"no plan on {none[0].name}{others}: {none[0].refused[0].what}; {none[0].refused[0].fix}"] if none else []
    planned = [row for row in found.rows if row.plan]
    lines = row_lines(planned, "machines", marked=False, notes=("pays", notes))
    return Reply([*lines, *told], figures | {"affordable": [row.name for row in found.affordable]})


def _priced(row: PlanRow) -> str:
    assert row.length and row.length.seconds and row.length.gpu_hours
    cost = "" if row.length.dollars is None else f", {show_dollars(row.length.dollars)}"
    hours = f"{show_hours(row.length.gpu_hours)} GPU-hours"
    return f"{row.name}, {counted(row.cluster.world, 'GPU')}, {show_duration(row.length.seconds)}, {hours}{cost}"


def row_lines(
    rows: Sequence[PlanRow], head: str, *, marked: bool = True, notes: tuple[str, dict[str, str]] | None = None
) -> list[str]:
    """A table of plans: whether each fits, a step with its band, what the run takes, and how it is split; the least of
    a figure ``marked`` with >, and with = what the bands cannot tell from it; ``notes`` are a head and by name what
    stands below it. Then why there is no plan of others."""
    least = {what: found for what in FIGURES if (found := least_of(rows, what))}
    heads = [*(FIGURES[what][0] for what in least), *([notes[0]] if notes else [])]
    table: list[tuple[str, ...]] = [(head, "", "per rank", "of", "a step", "low", "high", "tokens/s", *heads, "")]
    shown = [(row, row.plan, row.length) for row in rows if row.plan and row.length]
    for row, plan, _ in shown:
        step, (word, share) = seconds(plan), fit(plan.estimate)
        times = map(show_seconds, (step.step_s, step.low_s, step.high_s))
        cells = (row.name, word, show_bytes(plan.estimate.peak_bytes), f"{share:.0%}", *times)
        figures = (_figure(row, what, least[what] if marked else None) for what in least)
        split = f"{label(plan)}, recompute {plan.remat.mode}, {plan.batch.micro_batch_size} x {plan.batch.accumulation}"
        beside_ = [notes[1][row.name]] if notes else []
        table.append((*cells, show_count(tokens_per_s(plan)), *figures, *beside_, split))
    lines = columns(table, "<<" + ">" * (len(table[0]) - 3) + "<")
    body = [coloured(line, COLOURS[row[1]]) for line, row in zip(lines[1:], table[1:], strict=True)]
    refused = [f"{row.name}: {problem.what}; {problem.fix}" for row in rows for problem in row.refused[:1]]
    return [_asked(shown[0][1], [length for _, _, length in shown]), "", *lines[:1], *body, *refused, ""]


def _asked(plan: Plan, lengths: list[Length]) -> str:
    """Say what rows are plans of, and how much is read in a step."""
    runs, sizes = (dict.fromkeys(map(read, lengths)) for read in (length_head, lambda one: one.tokens // one.steps))
    steps = " to ".join(f"{size:,}" for size in sorted({min(sizes), max(sizes)}))
    return f"{plan.model} in steps of {steps} tokens; the run: {' or '.join(runs)}"


def _figure(row: PlanRow, what: str, least: tuple[PlanRow, list[PlanRow]] | None) -> str:
    best, ties = least or (None, [])
    mark = "> " if row is best else "= " if row in ties else ""
    figure = vars(row.length)[what]
    return "-" if figure is None else mark + FIGURES[what][1](figure)
