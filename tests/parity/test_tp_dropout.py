"""Dropout in adapters under tensor parallelism: the same masks on all ranks for what all hold, others for different
columns; recomputation makes each again. There is no parity with one process: the masks are what is compared."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.spec.plan import Lora
from shardwise.techniques import adapter, dropout
from tests.parity.test_tp import EVEN, plan

OF = replace(plan("ddp", 1, 2, sequence=True, remat="full"), lora=Lora(4, 8.0, frozen="fp64", dropout=0.4))
Masks = list[tuple[bool, Tensor]]


def masks(rank: int, world: int, alike: bool) -> Masks:
    """Of each call in one step, in order: whether ranks hold different columns there, and what was kept. ``alike``: a
    fault, all ranks draw the same for these too."""
    drawn: Masks = []
    dropped = dropout.dropped

    def record(x: Tensor, share: float, place: int | None = None) -> Tensor:
        out = dropped(torch.ones_like(x), share, None if alike else place)
        drawn.append((place is not None, out > 0))
        return x * out

    with patch.object(adapter, "dropped", record):
        parity.train(rank, EVEN, OF, 1)
    return drawn


def cut_masks_differ(found: list[Masks]) -> bool:
    """Whether those for different columns do, once those for what all ranks hold were seen to be the same."""
    first, second = found
    assert len(first) == len(second) == 2 * 7 * EVEN.num_hidden_layers  # forward, and recomputed
    assert [cut for cut, _ in first] == [cut for cut, _ in second]
    pairs = [(cut, a, b) for (cut, a), (_, b) in zip(first, second, strict=True)]
    assert {cut for cut, _, _ in pairs} == {False, True}
    assert all(torch.equal(a, b) for cut, a, b in pairs if not cut)
    return all(not torch.equal(a, b) for cut, a, b in pairs if cut)


def test_masks_of_ranks(ranks: RankPool) -> None:
    assert cut_masks_differ(ranks.run(masks, False, world=2))


def test_masks_that_are_drawn_alike_are_seen(ranks: RankPool) -> None:
    assert not cut_masks_differ(ranks.run(masks, True, world=2))


def test_recomputation_makes_the_same_masks(ranks: RankPool) -> None:
    """The blocks are recomputed in reverse order."""
    for drawn in ranks.run(masks, False, world=2):
        count = len(drawn) // 2
        assert count == 7 * EVEN.num_hidden_layers
        forward = [drawn[start : start + 7] for start in range(0, count, 7)]
        again = [drawn[start : start + 7] for start in range(count, 2 * count, 7)]
        for block, recomputed in zip(forward, reversed(again), strict=True):
            assert all(torch.equal(a, b) for (_, a), (_, b) in zip(block, recomputed, strict=True))
