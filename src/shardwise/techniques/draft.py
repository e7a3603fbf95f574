"""A unit of a sheet while a technique rewrites it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardwise.spec.sheet import Dim, Tensor, Unit


class Draft:
    """What may be changed of ``unit``; ``plain`` are its ``forward_plain``, ``gradients`` its ``weight_gradients``."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.tensors, self.saved = list(unit.tensors), set(unit.saved)
        self.forward, self.plain, self.backward = list(unit.forward), list(unit.forward_plain), list(unit.backward)
        self.gradients = dict(unit.weight_gradients)

    def add(self, *shape: Dim, dtype: str = "compute") -> int:
        """The index of a new tensor, inside attention or the MLP."""
        self.tensors.append(Tensor(f"t{len(self.tensors)}", shape, dtype, inside=True))
        return len(self.tensors) - 1

    def done(self, weights: Iterable[Tensor]) -> Unit:
        """The unit as it is now, with these weights."""
        return replace(
            self.unit,
            weights=tuple(weights),
            tensors=tuple(self.tensors),
            forward=tuple(self.forward),
            forward_plain=tuple(self.plain),
            backward=tuple(self.backward),
            weight_gradients=tuple(self.gradients.items()),
            saved=frozenset(self.saved),
        )
