"""The newest collective of this process, from torch's flight recorder."""

from __future__ import annotations

from shardwise.interop.torch_private import recorded_collectives


def newest_collective() -> tuple[str, int]:
    """Its name (such as ``all_reduce``) and its number in the default group; ("", 0) before the first."""
    for entry in reversed(recorded_collectives()):
        if not entry["is_p2p"]:
            return str(entry["profiling_name"]).rpartition(":")[2], int(entry["collective_seq_id"])
    return "", 0
