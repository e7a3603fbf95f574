"""The planner held against published measurements of other systems: memory, whether it fits, seconds.

    python -m bench.accuracy FILE.csv [--rows FILE] [--markdown FILE] [--json]

Run it from the root of a clone. It prints the report (page.md, whose end says how a row of the table is read), or its
figures as JSON; ``--rows`` writes every comparison.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from bench.accuracy.rows import said
from bench.accuracy.score import COLUMNS, MATTERS, Score, as_csv, line, rows_of, score
from shardwise.cli.show import visible
from shardwise.spec.units import markdown_table

WORST, NOTE = 10, 320
"""How many rows are shown, and how much of their notes."""
FIGURES = ("n", "median_ape", "p90_ape", "median_signed", "median_over_sources", "constant_guess_median_ape")
PAGE = Path(__file__).with_name("page.md")
"""The report, with names in braces where its figures go."""


def main(words: Sequence[str] | None = None) -> None:
    """Score the file; print, and write."""
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", metavar="FILE.csv", type=Path, help="measurements, one a row (docs/accuracy.md)")
    parser.add_argument("--rows", metavar="FILE", type=Path, help="write every comparison to this CSV file")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write the report to this file")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    given = parser.parse_args(words)
    report, scores = score(rows_of(given.file))
    text = page(report, scores, given.file.name)
    for path, written in ((given.rows, as_csv(COLUMNS, map(line, scores))), (given.markdown, text)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(written, encoding="utf-8")
    print(json.dumps(report, indent=1) if given.json else visible(text).rstrip())


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


if __name__ == "__main__":
    main()
