"""A plan in words, from the plan alone: what it is, whether it fits, where its memory goes, what it sends, and why."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from math import ceil
from typing import TYPE_CHECKING

from shardwise.spec.keys import PLANNED, dotted
from shardwise.spec.units import columns, show_bytes, show_count, show_payload, show_seconds

if TYPE_CHECKING:  # a plan explains itself
    from shardwise.spec.plan import Estimate, Plan

MARGIN = 0.8
"""An estimate below this share of the memory did not run out in 454 published runs (Fujii et al., arXiv 2411.06465)."""
NAMES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
SAVED = "remat.saved"
WORDS = {**PLANNED, "batch.loss_chunk_tokens": "tokens in a chunk of the loss", SAVED: "results that recompute saves"}
DRIVE_TBW = 600
"""What the maker of a drive of 1 TB warrants to be written to it (TBW), in TB."""
LONG_VALUE = 24
"""A value with more characters does not widen the column of values."""


def label(plan: Plan) -> str:
    """``ZeRO-3 over 8, 2 replicas``."""
    name, layout = NAMES[plan.shard.strategy], plan.layout
    words = plan.model_words
    if layout.size("loss") == 1 and words:
        return words
    tensor = f", {words}" if words else ""
    if plan.shard.strategy == "ddp":
        return f"{name} over {layout.size('loss')}{tensor}"
    replicas = f", {layout.dp_replicate} replicas (hybrid)" if layout.dp_replicate > 1 else ""
    return f"{name} over {layout.fsdp}{replicas}{tensor}"


def execution(plan: Plan) -> str:
    """The batch and what each rank does with it, in one line."""
    batch, dp = plan.batch, plan.layout.dp
    whole = batch.global_batch_size(dp)
    parts = [
        f"micro-batch {batch.micro_batch_size} x {batch.seq_len:,}",
        f"accumulation {batch.accumulation}",
        f"{whole} sequences ({show_count(whole * batch.seq_len)} tokens) per step",
        f"compute {plan.precision.compute}{plan.precision.products_words}, {plan.kept}",
        f"recompute {plan.remat.mode}",
    ]
    if plan.compile:
        parts.append("compiled")
    parts += plan.offload.words
    return " · ".join(parts)


def memory_lines(estimate: Estimate) -> list[str]:
    """Memory of the fullest rank at its peak, a category a line, with bars."""
    total = estimate.peak_bytes or sum(estimate.memory.values()) or 1
    bars = ("#" * ceil(40 * size / total) for size in estimate.memory.values() if size)
    rows = [(*row, next(bars, "")) for row in memory_rows(estimate)]
    lines = ["  " + line for line in columns(rows, "<><")]
    return [*lines, *(["  " + wear(estimate)] if estimate.disk_bytes else [])]


def memory_rows(estimate: Estimate) -> list[tuple[str, str]]:
    """Each category that has any memory, with its size; then what the rank holds on the host."""
    rows = [(name, show_bytes(size)) for name, size in estimate.memory.items() if size]
    return rows + [(f"{name}, on the host", show_bytes(size)) for name, size in estimate.host.items()]


def wear(estimate: Estimate) -> str:
    """Say what a step writes to a node's disks, and how many steps a small drive lasts; or what it only reads there."""
    if not estimate.written_bytes:
        return f"{show_bytes(estimate.disk_bytes)} of weights are on the disks of a node, and steps do not write there"
    steps = int(DRIVE_TBW * 1e12 / estimate.written_bytes)
    written = show_bytes(estimate.written_bytes)
    return f"a step writes {written} to the disks of a node: {steps:,} steps are {DRIVE_TBW} TB, what small drives last"


def traffic_lines(estimate: Estimate) -> list[str]:
    """Return a table of what one rank sends in one step: payload, by axis and link."""
    return ["  " + line for line in columns(traffic_rows(estimate), "<<<>><")]


def traffic_rows(estimate: Estimate) -> list[tuple[str, ...]]:
    """Axis, collective, what of, payload, calls and link, of all that one rank sends in one step."""
    rows = list[tuple[str, ...]]()
    for t in estimate.traffic:
        calls = f"in {t.count:,} call{'' if t.count == 1 else 's'}"
        rows.append((t.axis, words_of(t.kind), t.category, show_payload(t.bytes), calls, t.link))
    return rows


def verdict(estimate: Estimate) -> str:
    """``fits``, ``tight`` (with less than the margin) or ``does not fit``, with the share of the memory."""
    if not estimate.capacity_bytes:
        return "memory of the device unknown"
    word, share = fit(estimate)
    peak, capacity = show_bytes(estimate.peak_bytes), show_bytes(estimate.capacity_bytes)
    return f"{word}: {peak} of {capacity} ({share:.0%}){_on_host(estimate)}"


def _on_host(estimate: Estimate) -> str:
    """Say what a node's ranks hold on their host and its disks, if anything."""
    if not estimate.host_bytes:  # of a CPU, whose device is the host
        return f"; {_on_disk(estimate)}" if estimate.disk_bytes else ""
    held, capacity = show_bytes(estimate.host_bytes), show_bytes(estimate.host_capacity_bytes)
    share = f"{estimate.host_bytes / max(1, estimate.host_capacity_bytes):.0%}"
    disk = f", {_on_disk(estimate)}" if estimate.disk_bytes else ""
    return f"; {held} of {capacity} on the host ({share}){disk}"


def _on_disk(estimate: Estimate) -> str:
    if not estimate.disk_capacity_bytes:
        return f"{show_bytes(estimate.disk_bytes)} on its disks"
    share = f"{estimate.disk_bytes / estimate.disk_capacity_bytes:.0%}"
    return f"{show_bytes(estimate.disk_bytes)} of {show_bytes(estimate.disk_capacity_bytes)} on its disks ({share})"


def sentence(plan: Plan) -> str:
    """The verdict: whether it fits, as what, and how long a step takes."""
    estimate = plan.estimate
    word, share = fit(estimate)
    found = {"fits": "It fits", "tight": "It is tight", "does not fit": "It does not fit"}[word]
    size = f"{show_bytes(estimate.peak_bytes)} of {show_bytes(estimate.capacity_bytes)} a rank ({share:.0%})"
    size += _on_host(estimate)
    step = f", {show_seconds(estimate.seconds.step_s)} a step" if estimate.seconds else ""
    if word == "does not fit":
        return f"{found}: the smallest plan, {label(plan)}, needs {size}{step}."
    return f"{found}: {label(plan)}, {size}{step}."


def fit(estimate: Estimate) -> tuple[str, float]:
    """Say whether it fits, is tight or does not fit, with the share of the device's memory (0 where that is
    unknown)."""
    if not estimate.capacity_bytes:
        return "fits", 0.0
    word = "fits" if estimate.share <= MARGIN else "tight" if estimate.share <= 1 else "does not fit"
    return word, estimate.peak_bytes / estimate.capacity_bytes


def why_lines(plan: Plan) -> list[str]:
    """A reason for every value, under the recipe's name for it. Long values make no column wide, and where there is no
    value the reason stands in its place."""
    rows = why_rows(plan)
    name_width = max((len(name) for name, _, _ in rows), default=0)
    width = max((len(value) for _, value, _ in rows if len(value) <= LONG_VALUE), default=0)
    cells = ((f"{name:{name_width}}", *([f"{value:{width}}"] if value else []), reason) for name, value, reason in rows)
    return ["  " + "  ".join(row) for row in cells]


def why_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """The recipe's name of each setting that has a reason, its value, and the reason."""
    whole = {"batch.global_batch_size": plan.batch.global_batch_size(plan.layout.dp)}
    flat = dotted(asdict(plan)) | whole | {SAVED: ""}  # numbers, which the reason has in words
    return [(WORDS.get(key, key), _as_typed(flat.get(key)), reason) for key, reason in plan.why.items()]


def _as_typed(value: object) -> str:
    """A value, written as in a recipe, or nothing where there is none; of a long split how many stages have how many
    blocks."""
    if value is None or value in ("", (), []):
        return ""
    if isinstance(value, tuple | list):
        runs = [(len(list(same)), each) for each, same in groupby(value)]
        if len(str(list(value))) > LONG_VALUE:
            return ", ".join(f"{times} of {each}" for times, each in runs)
        return str(list(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def words_of(kind: str) -> str:
    """The kind of a collective, as it is written: ``all-reduce``."""
    return kind.replace("_", "-")


def text(plan: Plan) -> str:
    """Return all of it, as ``shardwise plan --plan`` prints it."""
    if not plan.estimate.memory:
        return "\n".join([f"{label(plan)} · {execution(plan)}", "nothing is estimated of it", *why_part(plan)])
    lines = [sentence(plan), "", execution(plan), "", "memory of the fullest rank at its peak"]
    lines += [*memory_lines(plan.estimate), ""]
    sent = traffic_lines(plan.estimate)
    lines += ["sent by each rank in a step" + ("" if sent else ": nothing"), *sent]
    return "\n".join([*lines, *why_part(plan)])


def why_part(plan: Plan) -> list[str]:
    """The reasons below a heading, if there are any."""
    return ["", "why", *why_lines(plan)] if plan.why else []
