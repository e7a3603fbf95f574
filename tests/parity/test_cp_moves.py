"""A run with context parallelism is saved, and goes on under another: other degrees and kinds, tensor parallelism,
stages, other strategies, and none. Weights and moments are what was saved, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from shardwise.prove.pool import RankPool
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Pipeline, Plan, Shard
from tests.parity.cases import FP64
from tests.parity.moving import goes_on
from tests.parity.rings import DENSE

ROWS, LENGTH = 4, 16
UNEVEN = replace(DENSE, hidden_size=18, intermediate_size=30)
"""Of whose sizes, and of 67 ids, some ranks have less than others."""


@dataclass(frozen=True)
class Side:
    kind: str
    strategy: str
    layout: Layout

    @property
    def plan(self) -> Plan:
        staged = self.layout.pp > 1
        micro = ROWS // self.layout.dp // (2 if staged else 1)
        plan = Plan(
            self.layout,
            Batch(micro, 2 if staged else 1, LENGTH),
            Shard(self.strategy),  # type: ignore[arg-type]
            FP64,
            sequence_parallel=self.layout.tp > 1,
            cp_kind=self.kind,  # type: ignore[arg-type]
        )
        return replace(plan, pipeline=Pipeline("1f1b", 1, (1, 1))) if staged else plan


SIDES = (
    Side("ring", "ddp", Layout(cp=2)),
    Side("gather", "zero3", Layout(cp=4)),
    Side("ulysses", "zero1", Layout(dp_shard=2, cp=2, ulysses=2)),
    Side("nested", "zero3", Layout(dp_replicate=2, cp=4, ulysses=2)),
    Side("ring", "zero3", Layout(cp=2, tp=2)),
    Side("ring", "zero2", Layout(pp=2, cp=2)),
    Side("ring", "zero3", Layout(dp_shard=4)),
    Side("ring", "ddp", Layout(tp=2)),
)


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", range(len(SIDES)))
def test_a_run_goes_on_under_another_layout(eight: RankPool, tmp_path: Path, place: int) -> None:
    """From each to the next and the one after that, so that every two neighbours are met."""
    targets = [SIDES[(place + step) % len(SIDES)].plan for step in (1, 2)]
    goes_on(eight, tmp_path, UNEVEN, SIDES[place].plan, targets)
