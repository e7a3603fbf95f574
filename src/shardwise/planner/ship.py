"""Makes the sheets that ship with the package: ``python -m shardwise.planner.ship``. A test makes them again."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from shardwise.models.config import ModelSpec, from_hf
from shardwise.models.known import configs
from shardwise.planner.sheets import SHIPPED, key, pack
from shardwise.planner.trace import trace

VARIANTS = ("narrow", "wide")


def well_known() -> list[ModelSpec]:
    """The models of the built-in table."""
    return [from_hf(config, name) for name, config in configs().items()]


def make(specs: list[ModelSpec]) -> dict[str, Any]:
    """Packed sheets by key; models that differ in depth alone share one."""
    made: dict[str, Any] = {}
    for spec in specs:
        for variant in VARIANTS:
            name = key(spec, variant)
            if name not in made:
                made[name] = json.loads(json.dumps(pack(trace(spec, variant), spec)))
    return made


def main() -> None:
    """Write the file that the package carries."""
    data = json.dumps(make(well_known()), separators=(",", ":")).encode()
    Path(__file__).with_name(SHIPPED).write_bytes(gzip.compress(data, mtime=0))


if __name__ == "__main__":
    main()
