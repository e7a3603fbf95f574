"""cluster.yaml: machines with what ``shardwise doctor`` measured on them. As strict as a plan: a file that was cut
short or edited into something else is refused, since half of its measurements would make wrong predictions."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from shardwise.errors import ConfigError, Problem
from shardwise.spec.cluster import Cluster, beyond_all, parse_cluster
from shardwise.spec.document import Document, KeyPath, read
from shardwise.spec.emit import emit
from shardwise.spec.units import show_bytes

LOCAL = "local"
"""The word for this machine."""
FORMAT = 1
MAY_BE_ZERO = ("_flops", "_per_s", "launch_s", "multiprocessors", "host_memory_bytes", "capability", "disk_bytes")
"""Ends of the names of numbers that are 0 where nothing is known; any other number counts, or took, something."""
LATER = ("disk_bytes", "disk_bytes_per_s", "measured.host_bytes_per_s", "measured.disk_read_bytes_per_s")
"""Keys that earlier files lack: what they say was not measured."""
LISTED = 5
"""So many problems of one file are told."""


def machines(text: str) -> Cluster:
    """Return the cluster that ``--cluster`` asks for: that in a file, where ``text`` names one, else
    :func:`parse_cluster`'s."""
    is_file = text.endswith((".yaml", ".yml")) or os.path.isfile(text)
    return load_cluster(Path(text)) if is_file else parse_cluster(text)


def dump_cluster(cluster: Cluster, head: tuple[str, ...] = ()) -> str:
    """YAML that :func:`load_cluster` reads back equal, below the lines of ``head`` as comments. The format comes last,
    so that a file without its end is known."""

    def comment(path: KeyPath, value: Any) -> str:
        return show_bytes(value) if str(path[-1]).endswith("memory_bytes") and value else ""

    return "".join(f"# {line}\n" for line in head) + emit(asdict(cluster) | {"format": FORMAT}, comment)


def load_cluster(path: Path) -> Cluster:
    """The cluster in ``path``. Raises ConfigError (CLU003) with the line, or MissingInputError (CFG011)."""
    try:
        document = read(path)
    except ConfigError as error:
        raise _damaged(path, *((problem.what, problem.where) for problem in error.problems)) from None
    data, found = document.data, [(problem.what, problem.where) for problem in document.problems]
    if not isinstance(data, dict) or "format" not in data:
        raise _damaged(path, ("it is no description of machines, or its end is missing", document.name))
    if data["format"] != FORMAT or found:
        newer = (f"it has the format {data['format']!r}, and this version reads {FORMAT}", document.place(("format",)))
        raise _damaged(path, *(found or [newer]))
    written = {key: value for key, value in data.items() if key != "format"}
    if found := list(_impossible(document, written, ())):
        raise _damaged(path, *found)
    try:
        cluster = TypeAdapter(Cluster).validate_json(json.dumps(written), strict=True)
    except ValidationError as error:
        told = error.errors(include_url=False, include_input=False)
        found = [(f"`{_dotted(e['loc'])}`: {e['msg']}", document.place(e["loc"])) for e in told]
        raise _damaged(path, *found) from None
    if too_many := beyond_all(cluster.nodes, cluster.devices_per_node):
        larger = max(("nodes", "devices_per_node"), key=vars(cluster).__getitem__)
        raise _damaged(path, (f"it has {too_many}", document.place((larger,))))
    if found := list(_differences(document, written, json.loads(json.dumps(asdict(cluster))), ())):
        raise _damaged(path, *found)
    return cluster


def _impossible(document: Document, value: Any, path: KeyPath) -> Iterator[tuple[str, str]]:
    """Numbers that no machine has."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _impossible(document, item, (*path, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        name = next(part for part in reversed(path) if isinstance(part, str))
        least = 0.0 if name.endswith(MAY_BE_ZERO) else math.ulp(0.0)
        if not least <= value < 1e30:
            yield f"`{_dotted(path)}` cannot be {value}", document.place(path)


def _differences(document: Document, written: Any, known: Any, path: KeyPath) -> Iterator[tuple[str, str]]:
    """Yield what is written and means nothing, and what is missing, each with its place."""
    if isinstance(written, list) and isinstance(known, list):
        for index, (item, other) in enumerate(zip(written, known, strict=True)):
            yield from _differences(document, item, other, (*path, index))
    elif isinstance(written, dict) and isinstance(known, dict):
        for key in written.keys() - known.keys():
            yield f"unknown key `{_dotted((*path, key))}`", document.place((*path, key))
        for key in known.keys() - written.keys():
            if _dotted((*path, key)) not in LATER:
                yield f"`{_dotted((*path, key))}` is missing", document.place(path)
        for key in written.keys() & known.keys():
            yield from _differences(document, written[key], known[key], (*path, key))


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _damaged(path: Path, *found: tuple[str, str]) -> ConfigError:
    fix = "`shardwise doctor -o cluster.yaml` makes one"
    told = sorted(found)[:LISTED]
    return ConfigError(*(Problem("CLU003", f"{path} cannot be used: {what}", where, fix) for what, where in told))
