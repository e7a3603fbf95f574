"""A run that is saved under one layout and goes on under others: what each of its tests asserts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwise.models.config import ModelSpec
from shardwise.prove import moves, parity
from shardwise.prove.pool import RankPool
from shardwise.spec.plan import Plan
from tests.parity import drawn


def goes_on(
    pool: RankPool, directory: Path, spec: ModelSpec, source: Plan, targets: Iterable[Plan]
) -> dict[str, Tensor]:
    """Weights and moments are what was saved, bit by bit, each by its name in the whole model; losses those of a run
    that nothing has cut, to 1e-9. Returns what was saved."""
    right = drawn.plain(parity.job_of(spec, source, 2 * moves.STEPS)).losses

    def stretches(plan: Plan, first: int) -> list[moves.Stretch]:
        run, world = moves.SavedRun(str(directory), first), plan.layout.world
        return pool.run(moves.go, spec, plan, run, drawn.RANDOM, world=world)

    begun = stretches(source, 0)
    saved = {name: value for rank in begun for name, value in rank.after.items()}
    assert any("exp_avg_sq" in name for name in saved)
    for rank in begun:
        assert rank.after.keys() == saved.keys() or source.layout.pp > 1, source
        assert all(torch.equal(saved[name], value) for name, value in rank.after.items()), source
    for target in targets:
        found = stretches(target, moves.STEPS)
        assert {name for rank in found for name in rank.before} == saved.keys(), (source, target)
        for rank in found:
            assert rank.before.keys() == saved.keys() or target.layout.pp > 1, (source, target)
            assert all(torch.equal(value, saved[name]) for name, value in rank.before.items()), (source, target)
            assert [*begun[0].losses, *rank.losses] == pytest.approx(right, rel=1e-9), (source, target)
    return saved
