"""Reads the Trace Event Format as its description has it, field by field, and says what is wrong."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

METADATA = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name", "thread_sort_index": ""}


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a file, compressed or not."""
    data = path.read_bytes()
    found = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    events: list[dict[str, Any]] = found["traceEvents"]
    return events


def spans(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in events if one["ph"] == "X"]


def named(events: list[dict[str, Any]], what: str) -> dict[tuple[int, int], str]:
    """The names of processes or threads by pid and tid."""
    return {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == what}


def faults(events: list[dict[str, Any]]) -> list[str]:
    """What a reader of the format would trip over: missing or mistyped fields, events out of order, negative times, and
    events of one thread that overlap without one holding the other."""
    found, moments = list[str](), list[float]()
    open_until = defaultdict[tuple[int, int], list[float]](list)
    for number, one in enumerate(events):
        where = f"event {number} {one.get('name')}"
        known = {"X": {"name", "cat", "ts", "dur", "args"}, "C": {"name", "ts", "args"}, "M": {"name", "args"}}
        if one.get("ph") not in known or {"ph", "pid", "tid"} | known[one["ph"]] != one.keys():
            found.append(f"{where}: fields {sorted(one)}")
            continue
        if not (type(one["pid"]) is type(one["tid"]) is int and isinstance(one["args"], dict) and one["name"]):
            found.append(f"{where}: types")
        if one["ph"] == "M":
            found += [f"{where}: metadata"] * (one["name"] not in METADATA or bool(moments))
            continue
        moments.append(one["ts"])
        if one["ph"] == "C":
            found += [f"{where}: counter"] * (not all(type(value) in (int, float) for value in one["args"].values()))
            continue
        begin, end, around = one["ts"], one["ts"] + one["dur"], open_until[one["pid"], one["tid"]]
        found += [f"{where}: nanoseconds"] * ((1e3 * begin) % 1 != 0 or (1e3 * one["dur"]) % 1 != 0)
        found += [f"{where}: negative"] * (begin < 0 or one["dur"] < 0)
        while around and around[-1] <= begin:
            around.pop()
        found += [f"{where}: overlaps"] * bool(around and around[-1] < end)
        around.append(end)
    found += ["not sorted"] * (moments != sorted(moments))
    threads = {(one["pid"], one["tid"]) for one in spans(events)}
    found += ["a thread without a name"] * (not threads <= named(events, "thread_name").keys())
    return found
