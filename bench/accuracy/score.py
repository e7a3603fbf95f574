"""How far the planner is from published measurements: errors by group of rows, and what a constant guess would score.

An error is predicted / measured - 1, in per cent; the constant guess is, for each GPU, the median share of its peak (of
its memory) that the group's rows reach. Percentiles are interpolated between the two nearest rows."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from bench.accuracy.memory import memory_of
from bench.accuracy.rows import Measurement, number, read, said
from shardwise.errors import ShardwiseError
from shardwise.models.config import active_parameter_count
from shardwise.models.mixers import mixer_of
from shardwise.planner.seconds.constants import shipped
from shardwise.planner.seconds.rates import Blocks, Traits
from shardwise.planner.seconds.step_seconds import timed
from shardwise.spec.files import read_regular

LONG_TOKENS = 16_384
PAIR = 0.1
MATTERS = {"mbs", "gbs", "grad_accum", "seq_len", "num_gpus", "gpu", "tp", "pp", "ac", "zero_stage", "sharding"}
"""Columns that a row of ``dense_16bit_stated`` has from its source."""
KINDS = {
    "torchtitan": "memory_reserved",
    "alloc": "memory_allocated",
    "active": "memory_allocated",
    "reserved": "memory_reserved",
    "": "memory_smi",
}
"""Counters of memory by a word of ``mem_def``, the first that matches; torchtitan logs what is reserved."""
BLOCKS: tuple[Blocks, ...] = ("eager", "fused", "compiled")
OWN_LOGIT_BYTES = 28
"""What our loss moves of a logit; others move what a logit takes in memory twice, written and read."""
EARLY = ("megatron21", "deepspeed")
"""Eras whose full shard gathered each parameter by itself."""
COLUMNS = ("id", "source", "group", "measured", "predicted", "error_pct", "guessed", "notes")


@dataclass(frozen=True)
class Score:
    """One quantity of one row: seconds, or bytes. ``full`` is what the GPU could do at its peak: the seconds that the
    model's operations would take, or the bytes it has."""

    row: Measurement
    group: str
    measured: float
    predicted: float
    full: float

    @property
    def error_pct(self) -> float:
        return 100 * (self.predicted / self.measured - 1)


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a header. Raises SystemExit, with what is wrong, of a file that is none."""
    try:
        text = read_regular(path).decode("utf-8-sig")
        if "\0" in text:
            raise _malformed(path, "it has a NUL byte")
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        rows = [*reader]
    except OSError as error:
        raise SystemExit(f"cannot read {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise _malformed(path, str(error)) from error
    if not {"gpu", "num_gpus", "layers"} & {*(reader.fieldnames or ())}:
        raise _malformed(path, "its first line names no column that is known")
    return [{key: value for key, value in row.items() if isinstance(value, str)} for row in rows]


def _malformed(path: Path, why: str) -> SystemExit:
    wanted = "a CSV file with the columns that docs/accuracy.md names, and a row for each measurement"
    return SystemExit(f"{path} is not a table of measurements: {why}; wanted is {wanted}")


def score(texts: Iterable[dict[str, str]]) -> tuple[dict[str, Any], list[Score]]:
    """The report, as ``--json`` prints it, and what it rests on."""
    scores: list[Score] = []
    skipped: Counter[str] = Counter()
    fits: Counter[tuple[bool, bool]] = Counter()
    total = 0
    for text in texts:
        total += 1
        row = read(text)
        try:
            memory, expected_s = (None, None) if isinstance(row, str) else (memory_of(row), predicted_s(row))
        except ShardwiseError as error:
            row = f"its plan cannot be priced ({error.problems[0].code})"
        if isinstance(row, str) or memory is None:
            skipped[str(row)] += 1
            continue
        capacity = row.cluster.device.memory_bytes
        failed = said(text, "outcome").upper() == "OOM"
        in_16_bits = row.plan.precision.products == "compute"  # else what others keep of a product in 8 bits is theirs
        if in_16_bits:
            fits[failed, memory.peak_bytes > capacity] += 1
        kind = next(kind for word, kind in KINDS.items() if word in said(text, "mem_def").lower())
        measured = (number(text, "peak_mem_gib") or 0) * 2**30
        if in_16_bits and measured and not failed and "only the cap" not in said(text, "mem_def"):
            predicted = memory.allocated_bytes if kind == "memory_allocated" else memory.peak_bytes
            scores += [Score(row, group, measured, predicted, capacity) for group in ("memory", kind)]
        seconds = measured_s(row)
        if seconds and expected_s and not failed:
            full = flops_per_token(row) * row.plan.batch.seq_len * _sequences(row) / row.cluster.device.bf16_flops
            scores += [Score(row, group, seconds, expected_s, full) for group in groups_of(row)]
    by_group: dict[str, list[Score]] = defaultdict(list)
    for one in scores:
        by_group[one.group].append(one)
    timed_groups = (
        "dense_16bit",
        "dense_16bit_stated",
        "fine_tune",
        "long",
        "experts",
        "experts_fine_tune",
        "dense_float8",
        "dense_mxfp8",
        "fine_tune_float8",
    )
    levels = levels_of(scores)
    names = (*timed_groups, "memory", *sorted({*KINDS.values()}))
    groups: dict[str, Any] = {name: summary(by_group[name], levels) for name in names}
    groups["fit"] = {
        "n": fits.total(),
        "right": fits[True, True] + fits[False, False],
        "false_does_not_fit": fits[False, True],
        "oom": fits[True, True] + fits[True, False],
        "missed_oom": fits[True, False],
    }
    groups["pairs"] = pairs(one for one in scores if one.group in ("dense_16bit", "fine_tune"))
    return {"groups": groups, "skipped": dict(skipped.most_common()), "rows": total}, scores


def groups_of(row: Measurement) -> list[str]:
    """The groups that the seconds of a row belong to."""
    inferred = {*said(row.text, "inferred_fields").split(), *row.guessed}
    stated = not inferred & (MATTERS | {"recompute"})
    if row.plan.precision.products != "compute":
        named = "float8" if said(row.text, "precision") == "fp8" else "mxfp8"
        return [f"dense_{named}" if said(row.text, "task") == "pretrain" else f"fine_tune_{named}"]
    if row.spec.experts:
        return ["experts"] if said(row.text, "task") == "pretrain" else ["experts_fine_tune"]
    dense = ["dense_16bit", *["dense_16bit_stated"] * stated] if said(row.text, "task") == "pretrain" else ["fine_tune"]
    return dense + ["long"] * (row.plan.batch.seq_len >= LONG_TOKENS)


def predicted_s(row: Measurement) -> float | None:
    """The seconds of a step of the row's plan, on its software."""
    found = timed(row.spec, row.plan, row.cluster, _traits(row)).estimate.seconds
    slices = row.plan.layout.dp_shard if row.plan.sharded and row.plan.shard.strategy == "zero1" else 0
    return None if found is None else found.step_s + row.habits.broadcast_s * slices


def efficiency(row: Measurement) -> float:
    """What the software of a row reaches of the best, as fitted for its era."""
    return shipped().get(f"era:{row.habits.era}", shipped()["era:fsdp2"])


def _traits(row: Measurement) -> Traits:
    """The program of a row as the planner's seconds see it."""
    known, habits, kernel = shipped(), row.habits, said(row.text, "attn").upper()
    major = (row.cluster.device.capability or (8, 0))[0]
    age = "ampere" if major <= 8 else "hopper" if major == 9 else "other"
    overlapped = re.search("async ?tp", said(row.text, "notes"), re.IGNORECASE)
    family = {"FA2": "flash2", "FA3": "cudnn"}.get(kernel, habits.attention)
    attention = family if family == "eager" else f"{family} {age}"
    return Traits(
        efficiency(row),
        known["step_s"],
        "compiled" if row.plan.compile else BLOCKS[max(habits.fusion, said(row.text, "mlp_gated") == "0")],
        attention if f"attention {attention}" in known else f"flash2 {age}",
        known["tp hidden"] if habits.tp_overlap or overlapped else 0.0,
        known["2021 network"] if habits.era in EARLY and row.plan.shard.strategy == "zero3" else None,
        bool(habits.step_copies),
        2 * habits.logit_bytes / OWN_LOGIT_BYTES if habits.logit_bytes else 1.0,
        chained=False,
        scattered=True,
        float8=(known["float8 product"], known["float8 casts"]),
    )


def _sequences(row: Measurement) -> float:
    """Sequences a step and GPU."""
    return row.plan.batch.global_batch_size(row.plan.layout.dp) / row.plan.layout.world


def measured_s(row: Measurement) -> float | None:
    """The seconds of a step that a row states: outright, or by its tokens, samples or operations a second."""
    tokens, batch = row.plan.batch.seq_len * _sequences(row), row.plan.batch
    notes = said(row.text, "notes")
    if "truncation" in notes:
        return None  # samples are shorter than seq_len: it bounds memory, not time
    if step_s := number(row.text, "step_time_s"):
        return step_s * (batch.accumulation if "MICRO-iteration" in notes else 1)
    if rate := number(row.text, "tokens_per_s_per_gpu"):
        return tokens / rate
    if rate := number(row.text, "samples_per_s"):
        return batch.global_batch_size(row.plan.layout.dp) / rate
    if rate := number(row.text, "tflops_per_gpu"):
        return flops_per_token(row, said(row.text, "tflops_def")) * tokens / (rate * 1e12)
    return None


def flops_per_token(row: Measurement, definition: str = "") -> float:
    """Operations a token by a definition in words: those of the model and full attention, unless it counts
    recomputation (``hardware``), half of attention (``causal``) or only parameters (``8*N*s*B``)."""
    spec, words = row.spec, definition.lower().replace("non-causal", "")
    parameters, table = active_parameter_count(spec), spec.vocab_size * spec.hidden_size
    if "8*n*s*b" in words:
        return 8.0 * parameters
    blocks = parameters - table * (1 if spec.tie_word_embeddings else 2)
    scores = sum(mixer_of(spec, layer).scores(spec) for layer in range(spec.num_hidden_layers))
    attention = 6.0 * scores * row.plan.batch.seq_len
    again = 4 / 3 if "hardware" in words and row.plan.remat.mode == "full" else 1.0
    return again * (6.0 * blocks + attention / (2 if "causal" in words else 1)) + 6.0 * table


def summary(scores: list[Score], levels: Levels) -> dict[str, Any]:
    """The statistics of a group."""
    by_source: dict[str, list[float]] = defaultdict(list)
    shares: dict[str, list[float]] = defaultdict(list)
    for one in scores:
        by_source[one.row.source].append(abs(one.error_pct))
        shares[one.row.cluster.device.name].append(one.full / one.measured)
    guess = {name: median(found) for name, found in shares.items()}
    guessed = [100 * abs(one.full / guess[one.row.cluster.device.name] / one.measured - 1) for one in scores]
    errors = [one.error_pct for one in scores]
    return {
        "n": len(scores),
        "median_ape": percentile([abs(error) for error in errors], 0.5),
        "p90_ape": percentile([abs(error) for error in errors], 0.9),
        "median_signed": percentile(errors, 0.5),
        "median_over_sources": percentile([median(found) for found in by_source.values()], 0.5),
        "constant_guess_median_ape": percentile(guessed, 0.5),
        "one_source_left_out": left_out(scores, levels),
    }


Levels = dict[tuple[str, str], float]
"""By era and source, the median of predicted / measured, had every software the efficiency of the best."""


def levels_of(scores: list[Score]) -> Levels:
    """Those of all seconds."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in scores:
        if one.group in ("dense_16bit", "fine_tune"):
            found[one.row.habits.era, one.row.source].append(_at_best(one))
    return {key: median(ratios) for key, ratios in found.items()}


def _at_best(one: Score) -> float:
    return efficiency(one.row) * one.predicted / one.measured


def left_out(scores: list[Score], levels: Levels) -> dict[str, float | None] | None:
    """The errors where the efficiency of an era comes from other sources only: of that era if there are any, else of
    all. None of memory, of which nothing is fitted."""
    errors = []
    for one in scores:
        others = {key: level for key, level in levels.items() if key[1] != one.row.source}
        alike = [level for (era, _), level in others.items() if era == one.row.habits.era] or [*others.values()]
        if alike and not one.group.startswith("memory"):
            errors.append(100 * abs(_at_best(one) / median(alike) - 1))
    if not errors:
        return None
    return {"n": len(errors), "median_ape": percentile(errors, 0.5), "p90_ape": percentile(errors, 0.9)}


def pairs(scores: Iterable[Score]) -> dict[str, Any]:
    """Of pairs of rows of one source, model, kind of GPU, number of GPUs, sequence length and batch whose tokens a
    second differ by more than ``PAIR``, the share whose order is predicted."""
    alike: dict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    for one in scores:
        row, tokens = one.row, one.row.plan.batch.seq_len * _sequences(one.row)
        told = [said(row.text, name) for name in ("task", "seq_len", "gbs")]
        key = row.source, row.spec.name, row.cluster.device.name, row.plan.layout.world, *told
        alike[key].append((tokens / one.measured, tokens / one.predicted))
    right = [
        (mine[0] > other[0]) == (mine[1] > other[1])
        for found in alike.values()
        for mine, other in combinations(found, 2)
        if max(mine[0], other[0]) > (1 + PAIR) * min(mine[0], other[0])
    ]
    return {"n": len(right), "right": sum(right), "share": round(sum(right) / len(right), 3) if right else None}


def percentile(values: list[float], share: float) -> float | None:
    """The value below which this share of ``values`` is, to a hundredth; None of none."""
    if not values:
        return None
    ordered, at = sorted(values), share * (len(values) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return round(ordered[low] + (at - low) * (ordered[high] - ordered[low]), 2)


def as_csv(columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> str:
    """Rows as a CSV file with a header."""
    table = io.StringIO()
    writer = csv.DictWriter(table, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return table.getvalue()


def line(one: Score) -> dict[str, Any]:
    """A score as a row of ``--rows``; seconds, or GiB."""
    unit = 2.0**30 if one.group.startswith("memory") else 1.0
    found = [said(one.row.text, "id"), one.row.source, one.group, one.measured / unit, one.predicted / unit]
    found += [one.error_pct, " ".join(one.row.guessed), said(one.row.text, "notes")]
    return dict(zip(COLUMNS, found, strict=True))
