"""``devices.json`` of the planner, from what ``shardwise doctor -o FILE`` wrote on machines with these GPUs.

python bench/devices.py h100.yaml h200.yaml > src/shardwise/planner/seconds/devices.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from shardwise.planner.seconds.device_rates import KINDS
from shardwise.spec.cluster_file import load_cluster


def rows_of(path: Path) -> tuple[str, dict[str, list[list[Any]]]]:
    """The name of the device of a file, and what was measured of what it computes, a row each."""
    cluster = load_cluster(path)
    if cluster.measured is None:
        raise SystemExit(f"{path} says nothing of what was measured")
    measured = vars(cluster.measured)
    return cluster.device.name, {kind: [[*vars(one).values()] for one in measured[kind]] for kind in KINDS}


def text(name: str, known: dict[str, list[list[Any]]]) -> str:
    """One device, a line a measurement."""
    each = [
        f"    {json.dumps(kind)}: [\n" + ",\n".join(f"      {json.dumps(row)}" for row in rows) + "\n    ]"
        for kind, rows in known.items()
    ]
    return f"  {json.dumps(name)}: {{\n" + ",\n".join(each) + "\n  }"


if __name__ == "__main__":
    print("{\n" + ",\n".join(text(*rows_of(Path(path))) for path in sys.argv[1:]) + "\n}")
