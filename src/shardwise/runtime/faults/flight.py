"""The newest collective of this process, from torch's flight recorders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.distributed.torch_private import recorded_collectives

NCCL = "nccl"


@dataclass(frozen=True)
class LastCollective:
    """The collective that the training groups were last asked for, such as ``all_reduce #20``, and how many they were
    asked for in all: a number that can be compared across ranks. ("", 0) before the first. ``pending``: something that
    NCCL was asked for has not ended; the process may know nothing of it, as it need not wait for NCCL where it asks."""

    name: str = ""
    number: int = 0
    pending: bool = False


def newest_collective() -> LastCollective:
    """Return the newest collective of the training groups. The group of the checkpoints, which runs beside, does not
    count."""
    entries = [entry for entry in recorded_collectives() if not entry["is_p2p"] and is_training(entry)]
    if not entries:
        return LastCollective()
    last: dict[tuple[str, str], int] = {}
    for entry in entries:  # a group has a backend for each kind of device, and each counts for itself
        last[entry["process_group"][0], backend(entry)] = int(entry["collective_seq_id"])
    pending = any(backend(entry) == NCCL and not ended(entry) for entry in entries)
    name = str(entries[-1]["profiling_name"]).rpartition(":")[2]
    return LastCollective(f"{name} #{entries[-1]['collective_seq_id']}", sum(last.values()), pending)


def is_training(entry: dict[str, Any]) -> bool:
    """Return whether a recorded collective belongs to the default group or to an axis of the mesh."""
    description = str(entry["process_group"][1])
    return description == "default_pg" or description.startswith("mesh_")


def backend(entry: dict[str, Any]) -> str:
    """``gloo`` or ``nccl``."""
    return str(entry["profiling_name"]).partition(":")[0]


def ended(entry: dict[str, Any]) -> bool:
    """Return whether a recorded collective is over: torch's watchdog has retired it, or the device has finished it."""
    return bool(entry["retired"]) or entry["state"] == "completed"
