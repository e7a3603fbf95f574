"""``shardwise plan-accuracy``: the planner held against published measurements."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

from typer import Argument, Option

from shardwise.cli.options import Common
from shardwise.cli.show import print_json, say, visible
from shardwise.data.whole import write_whole
from shardwise.interop.accuracy.rows import said
from shardwise.interop.accuracy.score import COLUMNS, MATTERS, Score, line, rows_of, score
from shardwise.spec.units import markdown_table

WORST, NOTE = 10, 320
"""How many rows are shown, and how much of their notes."""
FIGURES = ("n", "median_ape", "p90_ape", "median_signed", "median_over_sources", "constant_guess_median_ape")
INTRODUCTION = """# How far predictions are from published measurements

Made by `shardwise plan-accuracy {name} --markdown FILE`. Each row is read as a model, a plan and a cluster; the
planner prices it, and what it predicts is compared with what was measured. Errors are predicted / measured - 1, in
per cent, so a negative one means that the planner promises too much. Percentiles are interpolated. *Over sources* is
the median of the sources' own medians: a source with many rows counts once. *Constant guess* predicts of each GPU the
median share of its peak (or of its memory) that the rows of the group reach. With *one source left out* the efficiency
of a row's software comes from the other sources: of its era, if there are any, else of all. All other constants stay
as they were fitted, to these rows too: without that, errors are larger (`python -m shardwise.interop.accuracy.fit`).

Of {rows:,} rows {read:,} are compared."""
READING = """## How a row is read

Columns are found by name, in any order, and others are ignored. Needed: `gpu`, `num_gpus`, `layers`, `hidden`, `heads`,
`ffn`, `vocab`, `seq_len`, of several GPUs `mbs` or `gbs`, and something measured: `step_time_s`, or
`tokens_per_s_per_gpu`, `samples_per_s` or `tflops_per_gpu` with `tflops_def`; `peak_mem_gib` with `mem_def`; `outcome`
(`ok` or `OOM`). Read where they are given: `kv_heads`, `head_dim`, `mlp_gated`, `params_b`, `tp`, `fsdp_shard`,
`zero_stage`, `sharding`, `grad_accum`, `ac`, `precision`, `precision_detail`, `attn`, `compile`, `optimizer`, `task`,
`framework`, `interconnect`, `gpus_per_node`, `inferred_fields`, `notes`. What is blank is what the row's software
usually does.

The software of a row is not this one. Where it is known to differ, that is taken into account, as a trait that it has
or has not (interop/accuracy/traits.csv); no figure is fitted to a model or to a table. A block without a gate is priced
as one with a gate and as many weights; adapters are priced on all linear layers. Allocated memory is compared with what
the planner says that torch has allocated, any other counter with the whole peak. The samples of a batch that is not
packed are as long as `seq_len` where memory is compared, and its seconds are not."""


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
        table = io.StringIO()
        writer = csv.DictWriter(table, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(line, scores))
        write_whole(options.rows, table.getvalue())
    if options.markdown:
        write_whole(options.markdown, text)
    if options.json:
        print_json(report)
    else:
        say(visible(text).rstrip())


def page(report: dict[str, Any], scores: list[Score], name: str) -> str:
    """The report in Markdown."""
    fit, ordered, skipped = report["groups"]["fit"], report["groups"]["pairs"], report["skipped"]
    heads = ("group", "rows", "median", "p90", "signed", "over sources", "constant guess", "one source left out")
    groups = [(name, *_figures(found)) for name, found in report["groups"].items() if "median_ape" in found]
    said_not = f"{fit['false_does_not_fit']} that ran are said not to fit"
    missed = f"{fit['missed_oom']} of {fit['oom']} that ran out of memory are said to fit"
    parts = [
        INTRODUCTION.format(name=name, rows=report["rows"], read=report["rows"] - sum(skipped.values())),
        markdown_table(heads, groups),
        f"**Fit**: of {fit['n']} rows {fit['right']} are right. {said_not}, and {missed}.",
        f"**Order**: of {ordered['n']} pairs of rows of one source, model, set of GPUs, length and batch whose speed "
        f"differs by more than 10 %, {ordered['right']} are ordered right.",
        "## The largest errors\n\n" + markdown_table(("row", "what", "error", "why"), _worst(scores)),
        "## Skipped rows\n\n" + markdown_table(("rows", "why"), [(count, why) for why, count in skipped.items()]),
        READING,
    ]
    return "\n\n".join(parts) + "\n"


def _figures(found: dict[str, Any]) -> tuple[Any, ...]:
    apart = found["one_source_left_out"]
    return (*(found[key] for key in FIGURES), apart and f"{apart['median_ape']}, p90 {apart['p90_ape']}")


def _worst(scores: list[Score]) -> list[tuple[Any, ...]]:
    found: dict[tuple[str, str], tuple[Any, ...]] = {}
    for one in sorted(scores, key=lambda one: -abs(one.error_pct)):
        what = "memory" if one.group.startswith("memory") else "seconds"
        named = said(one.row.text, "id") or one.row.source
        found.setdefault(
            (named, what), (f"{named}, {said(one.row.text, 'model')}", what, f"{one.error_pct:+.0f} %", _why(one))
        )
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
