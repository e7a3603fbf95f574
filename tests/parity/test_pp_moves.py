"""Runs that are saved under one layout and go on under another, with and without stages, of a model with tied ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from shardwise.prove.pool import RankPool
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Plan, Shard
from tests.parity import pipes
from tests.parity.cases import FP64, ROWS, SEQ_LEN
from tests.parity.moving import goes_on

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
    goes_on(ranks, tmp_path, SPEC, source.plan, [target.plan for target in SIDES])
