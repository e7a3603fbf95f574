"""The planned step as a trace that ui.perfetto.dev and chrome://tracing read (the Trace Event Format): a process for
each kind of rank, or each rank of a pipeline, and a thread for each of its streams. Passes are named as ``train
--profile`` names them, whose trace the step may be added to."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from gzip import compress, decompress
from itertools import groupby
from math import floor
from pathlib import Path
from typing import Any

from shardwise.cli.options import misused
from shardwise.cli.planned import replayed
from shardwise.cli.timeline import NAMES
from shardwise.models.config import ModelSpec
from shardwise.planner.comparison import seconds
from shardwise.planner.step_record import Played, StepRecord, memory_of, streams_of_kinds
from shardwise.spec.cluster import Cluster
from shardwise.spec.explain import label
from shardwise.spec.plan import Plan
from shardwise.spec.range_names import OPTIMIZER, pass_name, stage_name
from shardwise.spec.units import show_seconds

MOST = 8
"""Micro-batches of a step that a trace has: the first ones, and the last, in which gradients leave."""
TICKS = 8
"""Of a microsecond: what is a whole number of them is also one of nanoseconds, and exact as a number of the format."""
WAYS = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
"""The pass of a stage that a computation of a pipeline is, or is half of."""
TraceEvent = dict[str, Any]
"""An event of the format: ``ph`` is X (from ``ts``, for ``dur``), C (a counter) or M (a name)."""
Trace = dict[str, Any]
"""A whole file, whose ``traceEvents`` are its events."""
Row = tuple[Played, Mapping[str, Any]]
"""What a thread does, and what is told of it."""


def read_measured(path: Path) -> Trace:
    """Return a trace that ``train --profile`` has written. Raises UsageError (CLI001) where it is none."""
    try:
        data = path.read_bytes()
        found: Trace = json.loads(decompress(data) if data.startswith(b"\x1f\x8b") else data)
        first_step(found)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{path} is no trace with steps: {getattr(error, 'strerror', None) or error}"
        raise misused(what, "a file of RUN/profile, which `train --profile` writes", "--beside") from None
    return found


def first_step(measured: Trace) -> float:
    """Return when the first step of a measured trace begins, in its microseconds. Raises ValueError without one."""
    return min(
        float(one["ts"])
        for one in measured["traceEvents"]
        if one.get("ph") == "X" and one.get("cat") == "user_annotation" and str(one["name"]).startswith("step ")
    )


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace, compressed where the file's name ends in ``.gz``. Raises OSError."""
    text = json.dumps(trace, separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(compress(text, mtime=0) if path.suffix == ".gz" else text)


def beside(measured: Trace, planned: Trace) -> Trace:
    """Return a measured trace with a planned step as further processes, which begins with its first step, to
    the microsecond."""
    own, begin = measured["traceEvents"], floor(first_step(measured))
    free = 1 + max((one["pid"] for one in own if isinstance(one.get("pid"), int)), default=0)
    moved = [
        {**one, "pid": free + one["pid"], **({"ts": begin + one["ts"]} if "ts" in one else {})}
        for one in planned["traceEvents"]
    ]
    return {**measured, "traceEvents": [*own, *moved]}


def trace_of(spec: ModelSpec, plan: Plan, cluster: Cluster) -> Trace:
    """A step of a plan with seconds: names first, then all events in the order in which they begin, what is around
    before what is within."""
    events = [*(_pipeline if plan.layout.pp > 1 else _kinds)(spec, plan, cluster)]
    events.sort(key=lambda one: (one["ph"] != "M", one.get("ts", 0), -one.get("dur", 0)))
    told = {"plan": label(plan), "step": show_seconds(seconds(plan).step_s)}
    return {"displayTimeUnit": "ms", "otherData": told, "traceEvents": events}


def _kinds(spec: ModelSpec, plan: Plan, cluster: Cluster) -> Iterator[TraceEvent]:
    """The events of one rank of each kind."""
    for record in streams_of_kinds(spec, plan, cluster, MOST):
        yield from _process(record.rank, "", record.micro_batches, plan)
        streams = sorted(record.streams.items(), key=lambda one: one[0] != "compute")
        for thread, (stream, played) in enumerate(streams):
            axes = dict.fromkeys(str(one.told["axis"]) for one in played if "axis" in one.told and thread)
            yield from _thread(record.rank, thread, stream + f" ({', '.join(axes)})" * bool(axes))
            rows = _passes(record, played) if stream == "compute" else ((one, _told(record, one)) for one in played)
            yield from _events(record.rank, thread, rows)
        for begin_s, held in memory_of(record, spec, plan, cluster):
            at = {"ph": "C", "name": "memory, highest of each pass", "pid": record.rank, "tid": 0}
            yield {**at, "ts": _ticks(begin_s) / TICKS, "args": held}


def _passes(record: StepRecord, played: Sequence[Played]) -> Iterator[Row]:
    """Each pass of a unit, and what the device waits for in it; one by one what is outside of all passes."""
    for during, group in groupby(played, key=lambda one: one.during):
        own = [*group]
        if during >= 0:
            _, begun = record.passes[during]
            name = pass_name(begun.direction, begun.unit)
            around = Played(own[0].begin_s, own[-1].end_s, begun.direction, name, name, during)
            yield around, _told(record, around)
        for one in own:
            if during < 0 or one.kind == "waits":
                yield one, _told(record, one)


def _told(record: StepRecord, one: Played) -> dict[str, Any]:
    return {**one.told, **({"micro_batch": record.passes[one.during][1].micro_batch} if one.during >= 0 else {})}


def _pipeline(spec: ModelSpec, plan: Plan, cluster: Cluster) -> Iterator[TraceEvent]:
    """The events of the ranks of a pipeline that are first on all other axes: when each computes which stage."""
    replay, found = replayed(spec, plan, cluster), seconds(plan)
    count = 1 + max(one.action.micro for computed in replay.computed for one in computed)
    after_s = replay.makespan_s
    if count == plan.batch.accumulation:  # or the end of the step would be that of another
        after_s = max(after_s, found.step_s - found.optimizer_s - found.host_s)
    for place, computed in enumerate(replay.computed):
        rank, stages = plan.layout.rank({"pp": place}), sorted({one.action.stage for one in computed})
        yield from _process(rank, f", stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}", count, plan)
        yield from _thread(rank, 0, "compute")
        rows: list[Row] = []
        for action, begin_s, end_s in computed:
            way = WAYS[action.kind]
            name = stage_name(way, action.stage)
            told = {"micro_batch": action.micro, "stage": action.stage, "part": NAMES[action.kind]}
            rows.append((Played(begin_s, end_s, way, name, name), told))
        at_s = after_s
        for name, part_s in ((OPTIMIZER, found.optimizer_s), ("host", found.host_s)):
            rows += [(Played(at_s, at_s + part_s, name, name, name), {})] * (part_s > 0)
            at_s += part_s
        yield from _events(rank, 0, rows)


def _process(rank: int, stages: str, micro_batches: int, plan: Plan) -> Iterator[TraceEvent]:
    every = plan.batch.accumulation
    some = f", {micro_batches} of {every} micro-batches" * (micro_batches < every)
    at = {"ph": "M", "pid": rank, "tid": 0}
    yield {**at, "name": "process_name", "args": {"name": f"planned rank {rank}{stages}{some}"}}
    yield {**at, "name": "process_sort_index", "args": {"sort_index": rank}}


def _thread(rank: int, thread: int, name: str) -> Iterator[TraceEvent]:
    at = {"ph": "M", "pid": rank, "tid": thread}
    yield {**at, "name": "thread_name", "args": {"name": name}}
    yield {**at, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _events(rank: int, thread: int, rows: Iterable[Row]) -> Iterator[TraceEvent]:
    """Of a thread: none begins before the one before it ends, unless within it."""
    outer = last = 0
    for one, told in rows:
        begin, end = _ticks(one.begin_s), _ticks(one.end_s)
        within = end <= outer
        begin = max(begin, last if within else outer)
        last, outer = (end if within else begin), max(outer, end)
        times = {"ts": begin / TICKS, "dur": max(0, end - begin) / TICKS}
        yield {"ph": "X", "name": one.name, "cat": one.kind, "pid": rank, "tid": thread, **times, "args": {**told}}


def _ticks(moment_s: float) -> int:
    return round(moment_s * TICKS * 1e6)
