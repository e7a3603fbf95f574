"""What is known of a model that runs in transformers' own modules. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

NOTICE = "in transformers' own modules (no types by module; docs/models.md)"
"""What a user is told of such a model."""


@dataclass(frozen=True)
class Foreign:
    """A model of transformers' own modules (models/foreign.py). ``config``: all of its config.json, as text. ``inner``:
    where in its model what runs all blocks is; ``places``: where each of our parts is, in the order in which they run.
    ``parameters``: canonical name, name in files, shape, and mean and deviation of the values that transformers begins
    with (None where it is not as simple); those of a block once, with {} for its number. ``turned``: those that the
    files have as [in, out]. ``ignored``: patterns of tensors in old files that are no parameters."""

    config: str
    inner: str
    places: tuple[tuple[str, str], ...]
    parameters: tuple[tuple[str, str, tuple[int, ...], tuple[float, float] | None], ...]
    turned: tuple[str, ...] = ()
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
