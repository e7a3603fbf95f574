"""``shardwise plan-accuracy``: the planner held against published measurements."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

from typer import Argument, Option

from shardwise.cli.options import Common
from shardwise.cli.show import print_json, say, visible, write_out
from shardwise.prove.accuracy.rows import said
from shardwise.prove.accuracy.score import COLUMNS, MATTERS, Score, as_csv, line, rows_of, score
from shardwise.spec.units import markdown_table

WORST, NOTE = 10, 320
"""How many rows are shown, and how much of their notes."""
FIGURES = ("n", "median_ape", "p90_ape", "median_signed", "median_over_sources", "constant_guess_median_ape")
PAGE = Path(__file__).with_suffix(".md")
"""The report, with names in braces where its figures go."""


@dataclass
class Options(Common):
    """Compare what the planner predicts with published measurements, of a CSV file: memory, whether it fits,
    seconds."""

    path: Annotated[Path, Argument(metavar="FILE.csv", help="Measurements, one a row (docs/accuracy.md).")]
    rows: Annotated[Path | None, Option("--rows", help="Write every comparison to this CSV file.")] = None
    markdown: Annotated[Path | None, Option("--markdown", help="Write the report to this file.")] = None


def run(options: Options) -> None:
    """Score the file; print, and write."""
    report, scores = score(rows_of(options.path))
    text = page(report, scores, options.path.name)
    if options.rows:
        write_out(options.rows, as_csv(COLUMNS, map(line, scores)), "--rows")
    if options.markdown:
        write_out(options.markdown, text, "--markdown")
    if options.json:
        print_json(report)
    else:
        say(visible(text).rstrip())


def page(report: dict[str, Any], scores: list[Score], name: str) -> str:
    """The report in Markdown."""
    found, skipped = report["groups"], report["skipped"]
    heads = ("group", "rows", "median", "p90", "signed", "over sources", "constant guess", "one source left out")
    groups = [(group, *_figures(each)) for group, each in found.items() if "median_ape" in each]
    return PAGE.read_text(encoding="utf-8").format(
        name=name,
        rows=report["rows"],
        read=report["rows"] - sum(skipped.values()),
        groups=markdown_table(heads, groups),
        fit=found["fit"],
        pairs=found["pairs"],
        worst=markdown_table(("row", "what", "error", "why"), _worst(scores)),
        skipped=markdown_table(("rows", "why"), [(count, why) for why, count in skipped.items()]),
    )


def _figures(found: dict[str, Any]) -> tuple[Any, ...]:
    apart = found["one_source_left_out"]
    return (*(found[key] for key in FIGURES), apart and f"{apart['median_ape']}, p90 {apart['p90_ape']}")


def _worst(scores: list[Score]) -> list[tuple[Any, ...]]:
    found: dict[tuple[str, str], tuple[Any, ...]] = {}
    for one in sorted(scores, key=lambda one: -abs(one.error_pct)):
        what = "memory" if one.group.startswith("memory") else "seconds"
        named = said(one.row.text, "id") or one.row.source
        cells = f"{named}, {said(one.row.text, 'model')}", what, f"{one.error_pct:+.0f} %", _why(one)
        found.setdefault((named, what), cells)
    return [*found.values()][:WORST]


def _why(one: Score) -> str:
    """What of a row is known to be uncertain: what it leaves open, and the beginning of its notes."""
    text, guessed = one.row.text, one.row.guessed
    inferred = sorted(MATTERS & {*said(text, "inferred_fields").split()} - {*guessed})
    words = [f"guessed here: {', '.join(guessed)}"] if guessed else []
    words += [f"not printed by its source: {', '.join(inferred)}"] if inferred else []
    words += ["figures of its GPU are not verified"] if one.row.cluster.device.verified == "no" else []
    words += [f"it says: {shorten(said(text, 'notes'), NOTE)}"] if said(text, "notes") else []
    return "; ".join(words) or "nothing that the row says"
