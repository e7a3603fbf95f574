"""``shardwise plan-accuracy``: the planner held against published measurements."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from shardwise.cli.options import Common
from shardwise.cli.show import print_json, say
from shardwise.data.whole import write_whole
from shardwise.planner.accuracy.score import COLUMNS, Score, line, rows_of, score

WORST = 10
HEADS = ("group", "rows", "median", "p90", "signed", "over sources", "constant guess")
KEYS = ("n", "median_ape", "p90_ape", "median_signed", "median_over_sources", "constant_guess_median_ape")


@dataclass
class Options(Common):
    """Compare what the planner predicts with measurements of a CSV file: memory, whether it fits, seconds."""

    path: Annotated[Path, Argument(metavar="FILE.csv", help="Measurements, one a row (docs/accuracy.md).")]
    rows: Annotated[Path | None, Option("--rows", help="Write every comparison to this CSV file.")] = None
    markdown: Annotated[Path | None, Option("--markdown", help="Write the page docs/accuracy.md to this file.")] = None


def run(options: Options) -> None:
    """Score the file, print and write."""
    report, scores = score(rows_of(options.path))
