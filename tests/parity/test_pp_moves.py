"""Runs that are saved under one layout and go on under another, with and without stages, of a model with tied ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from shardwise.prove import moves, parity
from shardwise.prove.pool import RankPool
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Shard
from tests.parity import drawn, pipes
from tests.parity.cases import FP64, ROWS, SEQ_LEN

SPEC = pipes.spec_of("tied", 4)


@dataclass(frozen=True)
class Staged:
    """A layout by its name: a schedule over two ranks, or a strategy over two without stages."""

    name: str

    @property
    def plan(self) -> Plan:
        if self.name in ("zero1", "zero3"):
            batch = Batch(ROWS // 2, 1, SEQ_LEN)
            return Plan(Layout(dp_shard=2), batch, Shard(self.name), FP64)  # type: ignore[arg-type]
        schedule, _, beside = self.name.partition(" x ")
        plan = pipes.plan(schedule, SPEC, pp=2, tp=2 if beside else 1)
        return replace(plan, batch=replace(plan.batch, micro_batch_size=2, accumulation=ROWS // 2))


SIDES = [Staged(name) for name in ("zero1", "1f1b", "interleaved", "zbv", "1f1b x tp 2", "zero3")]


@pytest.mark.prove
@pytest.mark.timeout(300)
@pytest.mark.parametrize("source", SIDES, ids=lambda side: side.name)
def test_K3_a_run_goes_on_under_every_layout(ranks: RankPool, tmp_path: Path, source: Staged) -> None:
    """Its own among them. Weights and moments are what was saved, bit by bit, each by its name in the whole model;
    losses those of a run that nothing has cut, to 1e-9."""
    right = drawn.plain(parity.job_of(SPEC, source.plan, 2 * moves.STEPS)).losses
    run, world = moves.SavedRun(str(tmp_path)), source.plan.layout.world
    begun = ranks.run(moves.go, SPEC, source.plan, run, drawn.RANDOM, world=world)
    saved = {name: value for rank in begun for name, value in rank.after.items()}
    assert any("exp_avg_sq" in name for name in saved)
    assert all(torch.equal(value, saved[name]) for rank in begun for name, value in rank.after.items())
    for target in SIDES:
        of, run = target.plan, moves.SavedRun(str(tmp_path), moves.STEPS)
        there = ranks.run(moves.go, SPEC, of, run, drawn.RANDOM, world=of.layout.world)
        assert {name for rank in there for name in rank.before} == saved.keys()
        for rank in there:
            assert all(torch.equal(value, saved[name]) for name, value in rank.before.items()), target
            assert [*begun[0].losses, *rank.losses] == pytest.approx(right, rel=1e-9), target
