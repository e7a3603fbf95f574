"""Ranks with a fault in their code, for proofs that have to see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwise.prove.pool import PATIENCE_S, RankPool


@dataclass(frozen=True)
class FaultyRanks:
    """Ranks of a pool, on each of which ``planted(rank, world, name, work, given)`` does the work with the fault of
    this name in its code."""

    pool: RankPool
    name: str
    planted: Callable[..., Any]

    def run(self, fn: Callable[..., Any], *args: Any, world: int = 2, timeout_s: float = PATIENCE_S) -> list[Any]:
        return self.pool.run(self.planted, self.name, fn, args, world=world, timeout_s=timeout_s)
