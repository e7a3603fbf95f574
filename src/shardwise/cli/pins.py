"""The settings by which a recipe pins what a plan would choose."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from shardwise.spec.recipe import Parallel, Recipe

PINNING = {
    "parallel": tuple(key for key in Parallel.model_fields if key != "expert_imbalance"),
    "recompute": ("mode", "every"),
    "offload": ("optimizer", "optimizer_fraction", "activations", "weights"),
    "train": ("micro_batch_size", "gradient_accumulation_steps"),
}
"""Keys of a recipe by section that say how a run is split, recomputed and offloaded, and not what it trains. They are
chosen, or left out, where the recipe does not give them."""


class Pin(NamedTuple):
    """A setting as it is ``given``, and the one that leaves its key ``free``, both as they are typed."""

    given: str
    free: str


def pins_of(recipe: Recipe, *sections: str) -> list[Pin]:
    """Return what the recipe pins in these sections."""
    found = []
    for name in sections or PINNING:
        section = getattr(recipe, name)
        for key, value in section.model_dump(include={*PINNING[name]}, exclude_defaults=True).items():
            default = type(section).model_fields[key].default
            found.append(Pin(*(f"{name}.{key}={_typed(each)}" for each in (value, default))))
    return found


def _typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
