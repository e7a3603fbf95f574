"""The newest collective of this process, from torch's flight recorder."""

from __future__ import annotations

from typing import Any

from shardwise.interop.torch_private import recorded_collectives


def newest_collective() -> tuple[str, int]:
    """What the training groups were last asked for, such as ``all_reduce #20``, and how many collectives they were
    asked for in all: a number that can be compared across ranks. The group of the checkpoints, which runs beside, does
    not count. ("", 0) before the first."""
    entries = [entry for entry in recorded_collectives() if not entry["is_p2p"] and is_training(entry)]
    if not entries:
        return "", 0
    last: dict[str, int] = {}
    for entry in entries:
        last[entry["process_group"][0]] = int(entry["collective_seq_id"])
    name = str(entries[-1]["profiling_name"]).rpartition(":")[2]
    return f"{name} #{entries[-1]['collective_seq_id']}", sum(last.values())


def is_training(entry: dict[str, Any]) -> bool:
    """Whether a recorded collective belongs to the default group or to an axis of the mesh."""
    description = str(entry["process_group"][1])
    return description == "default_pg" or description.startswith("mesh_")
