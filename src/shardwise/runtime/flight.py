"""The newest collective of this process, from torch's flight recorder (a private name of torch 2.11 to 2.13)."""

from __future__ import annotations

import json

from torch._C._distributed_c10d import _dump_fr_trace_json


def newest_collective() -> tuple[str, int]:
    """Its name (such as ``all_reduce``) and its number in the default group; ("", 0) before the first."""
    entries = json.loads(_dump_fr_trace_json(includeCollectives=True, onlyActive=False)).get("entries") or []
    for entry in reversed(entries):
        if not entry["is_p2p"]:
            return str(entry["profiling_name"]).rpartition(":")[2], int(entry["collective_seq_id"])
    return "", 0
