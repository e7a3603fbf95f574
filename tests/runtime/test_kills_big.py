"""Kills again and again: runs that die at random places, several times each, end as the one that did not."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from tests.runtime.small_run import directory, numbers, recipe, train_ranks, weights_hash

PHASES = ("data", "count", "forward", "backward", "reduce", "clip", "optimizer", "logging")
SEEDS, KILLS = 12, 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kills")


def whole(root: Path, strategy: str) -> Path:
    """The run that nothing interrupts, made once for each strategy."""
    made = recipe(root, f"whole-{strategy}")
    if not directory(made).exists():
        assert train_ranks(made, strategy) == [0, 0]
    return directory(made)


@pytest.mark.big
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_kills(root: Path, seed: int) -> None:
    """Steps of the orders rise, so that each is reached: after a kill the run goes on from step 3 or 6 or the start."""
    draw = random.Random(seed)
    strategy = draw.choice(("ddp", "zero1", "zero2", "zero3"))
    right = whole(root, strategy)
    made = recipe(root, f"killed-{seed}", checkpoint={"asynchronous": draw.random() < 0.5})
    for step in sorted(draw.sample(range(1, 8), KILLS)):
        rank = draw.randrange(2)
        order = f"{draw.choice(PHASES)}:{step}:{rank}"
        codes = train_ranks(made, strategy, fault=order)
        assert codes[rank] == -signal.SIGKILL, order
        assert (directory(made) / f"fault-{order.replace(':', '-')}").exists()
    assert train_ranks(made, strategy) == [0, 0]
    assert numbers(directory(made)) == numbers(right)
    assert weights_hash(directory(made)) == weights_hash(right)
