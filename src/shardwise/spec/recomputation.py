"""What a plan says of recomputation: its mode, of which blocks, and with a budget what these save all the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, order=True)
class SavedResult:
    """A result that ``budget`` saves: in blocks of so many matrix ``products``, of what ``selective`` would save,
    in forward's order, that at a ``place``; in so many ``eighths`` of the blocks, evenly spread."""

    products: int
    place: int
    eighths: int = 8


@dataclass(frozen=True)
class Remat:
    """``saved``: what blocks that recompute save, with ``budget``."""

    mode: Literal["none", "selective", "budget", "full"] = "none"
    every: int = 1
    saved: tuple[SavedResult, ...] = ()

    @property
    def saves(self) -> bool:
        """Whether blocks that recompute save results of operations."""
        return self.mode in ("selective", "budget")

    def places(self, block: int, products: int) -> tuple[int, ...]:
        """Return, with ``budget``, the places of what the block of this number in the whole model saves, which has so
        many matrix products."""
        turn = block // self.every
        own = (one for one in self.saved if one.products == products)
        return tuple(one.place for one in own if (turn + 1) * one.eighths // 8 > turn * one.eighths // 8)

    def treats(self, block: int) -> bool:
        """Say whether the block of this number in the whole model recomputes."""
        return self.mode != "none" and block % self.every == 0
