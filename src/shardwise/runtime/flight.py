"""The newest collective of this process, from torch's flight recorder (a private name of torch 2.11 to 2.13)."""

from __future__ import annotations

import json
from typing import Any

from torch._C._distributed_c10d import _dump_fr_trace_json


def newest_collective() -> tuple[str, int]:
    """What the training groups were last asked for, such as ``all_reduce #20``, and how many collectives they were asked
    for in all: a number that can be compared across ranks. The group of the checkpoints, which runs beside, does not
    count. ("", 0) before the first."""
    trace = json.loads(_dump_fr_trace_json(includeCollectives=True, onlyActive=False))
    entries = [entry for entry in trace.get("entries") or [] if not entry["is_p2p"] and _is_training(entry)]
    if not entries:
        return "", 0
    last: dict[str, int] = {}
    for entry in entries:
        last[entry["process_group"][0]] = int(entry["collective_seq_id"])
    name = str(entries[-1]["profiling_name"]).rpartition(":")[2]
    return f"{name} #{entries[-1]['collective_seq_id']}", sum(last.values())


def _is_training(entry: dict[str, Any]) -> bool:
    description = entry["process_group"][1]
    return description == "default_pg" or description.startswith("mesh_")
