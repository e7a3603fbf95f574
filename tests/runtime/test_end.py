"""Ranks end a validation at the same batch, whichever of them was asked to stop."""

from __future__ import annotations

import pytest

from shardwise.prove.pool import RankPool
from tests.runtime import rank_work


@pytest.mark.parametrize("asked", [0, 1])
def test_ranks_vote_before_every_batch(ranks: RankPool, asked: int) -> None:
    assert ranks.run(rank_work.validate_until_asked, asked, 2, world=2) == [([0, 1, 2], True)] * 2
    assert ranks.run(rank_work.validate_until_asked, asked, 9, world=2) == [([0, 1, 2, 3, 4], False)] * 2
