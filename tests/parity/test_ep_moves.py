"""A run whose ranks have different experts is saved, and goes on under another layout: other degrees of ep, tensor
parallelism, stages, other strategies, and in one process. Weights and moments are what was saved, bit by bit, each
whole and by its name in the whole model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from shardwise.models.config import parameter_shapes, with_fields
from shardwise.prove.pool import RankPool
from shardwise.runtime.checkpoint import manifest
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Pipeline, Plan, Shard
from tests.parity.cases import FP64
from tests.parity.mixtures import GPT_OSS
from tests.parity.moving import goes_on

ROWS, LENGTH = 4, 15
SPEC = with_fields(GPT_OSS, hidden_size=18, expert_size=10, num_hidden_layers=3, layer_types=(), dense_layers=(0,))
"""Of whose sizes, and of 67 ids, some ranks have less than others."""


@dataclass(frozen=True)
class Side:
    strategy: str
    layout: Layout

    @property
    def plan(self) -> Plan:
        staged = self.layout.pp > 1
        micro = ROWS // self.layout.dp // (2 if staged else 1)
        batch, shard = Batch(micro, 2 if staged else 1, LENGTH), Shard(self.strategy)  # type: ignore[arg-type]
        plan = Plan(self.layout, batch, shard, FP64, sequence_parallel=self.layout.tp > 1)
        return replace(plan, pipeline=Pipeline("1f1b", 1, (2, 1))) if staged else plan


SIDES = (
    Side("zero3", Layout(dp_shard=4, ep=2)),
    Side("zero3", Layout(dp_shard=4, ep=4)),
    Side("ddp", Layout()),
    Side("zero3", Layout(dp_shard=2, tp=2, ep=4)),
    Side("zero1", Layout(dp_shard=2, pp=2, ep=2)),
    Side("zero3", Layout(dp_shard=4)),
    Side("ddp", Layout(tp=4, ep=2)),
    Side("zero3", Layout(dp_replicate=2, dp_shard=2, ep=2)),
)


@pytest.mark.rare(8)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", range(len(SIDES)))
def test_K1_K2_a_run_goes_on_under_another_layout(ranks: RankPool, tmp_path: Path, place: int) -> None:
    """From each to itself, to the next and to the one after that, so that every two neighbours are met."""
    targets = [SIDES[(place + step) % len(SIDES)].plan for step in (0, 1, 2)]
    saved = goes_on(ranks, tmp_path, SPEC, SIDES[place].plan, targets)
    [written] = (manifest.check(path) for path in tmp_path.rglob("step-*") if path.is_dir())
    for name, shape in parameter_shapes(SPEC).items():
        kept = [key for key in saved if key.endswith(f".{name}")]
        assert len(kept) == 3 and {written.tensors[key].shape for key in kept} == {shape}, name
        assert all(saved[key].shape == shape for key in kept), name
