"""A run whose ranks have different experts is saved, and goes on under another layout: other degrees of ep, tensor
parallelism, stages, other strategies, and in one process. Weights and moments are what was saved, bit by bit, each
whole and by its name in the whole model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from shardwise.models.config import parameter_shapes
from shardwise.prove import moves, parity
from shardwise.prove.pool import RankPool
from shardwise.runtime.checkpoint import manifest
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Pipeline, Plan, Shard
from tests.parity import drawn
from tests.parity.cases import FP64
from tests.parity.mixtures import GPT_OSS

ROWS, LENGTH = 4, 15
SPEC = replace(GPT_OSS, hidden_size=18, expert_size=10, num_hidden_layers=3, layer_types=(), dense_layers=(0,))
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


@pytest.mark.rare(4)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", range(len(SIDES)))
def test_K1_K2_a_run_goes_on_under_another_layout(ranks: RankPool, tmp_path: Path, place: int) -> None:
    """From each to itself, to the next and to the one after that, so that every two neighbours are met."""
    source = SIDES[place]
    right = drawn.plain(parity.job_of(SPEC, source.plan, 2 * moves.STEPS)).losses
    run, world = moves.SavedRun(str(tmp_path)), source.plan.layout.world
    begun = ranks.run(moves.go, SPEC, source.plan, run, drawn.RANDOM, world=world)
    saved = {name: value for rank in begun for name, value in rank.after.items()}
    for rank in begun:
        assert all(torch.equal(saved[name], value) for name, value in rank.after.items()), source
    [written] = (manifest.check(path) for path in tmp_path.rglob("step-*") if path.is_dir())
    for name, shape in parameter_shapes(SPEC).items():
        kept = [key for key in saved if key.endswith(f".{name}")]
        assert len(kept) == 3 and {written.tensors[key].shape for key in kept} == {shape}, name
        assert all(saved[key].shape == shape for key in kept), name
    for step in (0, 1, 2):
        target = SIDES[(place + step) % len(SIDES)]
        again, world = moves.SavedRun(str(tmp_path), moves.STEPS), target.plan.layout.world
        found = ranks.run(moves.go, SPEC, target.plan, again, drawn.RANDOM, world=world)
        assert {name for rank in found for name in rank.before} == saved.keys()
        for rank in found:
            assert all(torch.equal(value, saved[name]) for name, value in rank.before.items()), (source, target)
            assert [*begun[0].losses, *rank.losses] == pytest.approx(right, rel=1e-9), (source, target)
