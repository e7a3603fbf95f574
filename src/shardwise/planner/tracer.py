"""The process that traces units (planner/apart.py): it reads names of variants and writes a packed unit for each."""

from __future__ import annotations

import json
import signal
import sys

from shardwise.planner.sheets import pack_unit, variant_of
from shardwise.planner.trace import trace

WAITS_S = 20
"""Much longer than a search takes from one new unit to the next; a run that follows it needs the memory."""


def main() -> None:
    """Trace the variants whose names are read, each at once, until none comes for a while."""
    signal.alarm(WAITS_S)
    for line in sys.stdin:
        signal.alarm(0)
        print(json.dumps(pack_unit(trace(variant_of(line))), separators=(",", ":")), flush=True)
        signal.alarm(WAITS_S)


if __name__ == "__main__":
    main()
