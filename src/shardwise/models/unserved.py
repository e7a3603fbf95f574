"""Models that are not supported, recognised by config.json or by name (unserved.json). Imports no torch: what needs the
model to be built is found by models/hf_model.py.

    counts   keys of a config of which one is above 1
    keys     keys of which one is given, and not off
    layers   words of ``layer_types``
    kinds    ``model_type``
    names    a pattern in a model's name without its owner, for where no config.json is at hand
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, Problem


@cache
def _rows() -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
    return rows


def refuse_config(config: dict[str, Any], name: str) -> None:
    """Raise ConfigError MOD001 for a model of a kind that is not supported; its text part counts too."""
    inner = [part for part in config.values() if isinstance(part, dict) and "hidden_size" in part]
    for row in _rows():
        kinds, layers = row.get("kinds", "").split(), set(row.get("layers", "").split())
        for part in (config, *inner):
            types = part.get("layer_types")
            found = [key for key in row.get("counts", "").split() if type(part.get(key)) is int and part[key] > 1]
            found += [key for key in row.get("keys", "").split() if part.get(key)]
            found += [kind for kind in types if kind in layers] if isinstance(types, list) else []
            if found or part.get("model_type") in kinds:
                raise _refused(name, row["what"], f"config of {name}")


def refuse_name(source: str) -> None:
    """Raise ConfigError MOD001 where the name of a model says that it is of such a kind."""
    name = source.rpartition("/")[2]
    for row in _rows():
        if "names" in row and re.search(row["names"], name.lower()):
            raise _refused(name, row["what"], "model.path")


def _refused(name: str, what: str, where: str) -> ConfigError:
    fix = "a model of another family (docs/models.md), or the module in your own training loop (docs/own-loop.md)"
    return ConfigError(Problem("MOD001", f"{name} {what}", where, fix))
