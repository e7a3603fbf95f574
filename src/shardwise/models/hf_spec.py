"""The facts of a model that runs in transformers' own modules. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NoReturn

from shardwise.errors import ConfigError, Problem
from shardwise.models.family import FULL, SLIDING
from shardwise.models.rope import unsupported

NOTICE = "in transformers' own modules (without precision.modules; docs/models.md)"
"""What is printed about such a model."""


@dataclass(frozen=True)
class HFModel:
    """A model of transformers' own modules (models/hf_model.py). ``config``: all of its config.json, as text.
    ``inner``: where in its model what runs all blocks is; ``places``: where each of our parts is, in the order in which
    they run.
    ``parameters``: canonical name, name in files, shape, and mean and deviation of the values that transformers begins
    with (None where it is not as simple); those of a block once, with {} for its number. ``transposed``: those that the
    files have as [in, out]. ``ignored``: patterns of tensors in old files that are no parameters."""

    config: str
    inner: str
    places: tuple[tuple[str, str], ...]
    parameters: tuple[tuple[str, str, tuple[int, ...], tuple[float, float] | None], ...]
    transposed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def shapes(self, layers: int) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter of a model with so many blocks."""
        found: dict[str, tuple[int, ...]] = {}
        blocks = [(name, shape) for name, _, shape, _ in self.parameters if name.startswith("layers.{}.")]
        for name, _, shape, _ in self.parameters:
            if (name, shape) == blocks[0]:
                found |= {key.format(layer): size for layer in range(layers) for key, size in blocks}
            elif not name.startswith("layers.{}."):
                found[name] = shape
        return found

    def drawn(self, name: str) -> tuple[float, float]:
        """Mean and deviation of the initial values of a parameter."""
        found = {ours: drawn for ours, _, _, drawn in self.parameters}[re.sub(r"^layers\.\d+\.", "layers.{}.", name)]
        assert found is not None  # such a model is refused (models/resolve.py)
        return found


def refuse(name: str, what: str) -> NoReturn:
    """Raise MOD001 for a model that cannot be taken over."""
    fix = "a model of another family, or the module in your own training loop (docs/own-loop.md)"
    raise unsupported(f"not supported: {what}", name, fix)


def check_supported(config: dict[str, Any], name: str) -> None:
    """Raise MOD001 for what its config alone shows not to be served, PLAN008 for ids that it has not."""
    kind, types = config["model_type"], config.get("layer_types")
    if config.get("quantization_config"):
        refuse(name, "its layers are quantised as they run (quantization_config)")
    if kind in ("bloom", "mpt") or config.get("alibi"):
        refuse(
            name,
            f"{kind} uses ALiBi, which adds positions to the attention scores: only rotary or learned ones work here",
        )
    others = [layer for layer in types if layer not in (FULL, SLIDING)] if isinstance(types, list) else []
    if others:
        refuse(name, f"{kind} has layers of type {others[0]!r}; supported are {FULL} and {SLIDING}")
    pad, size = config.get("pad_token_id"), config.get("vocab_size")
    if isinstance(pad, int) and isinstance(size, int) and pad >= size:
        what, fix = f"pad_token_id {pad} is not one of the {size} ids of vocab_size", "pad_token_id: null"
        raise ConfigError(Problem("PLAN008", what, f"config of {name}", fix))
