"""Dropout in adapters under tensor parallelism: the same masks on all ranks for what all hold, others for different
columns; recomputation makes each again. There is no parity with one process: the masks are what is compared."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.spec.plan import Lora, Plan
from shardwise.techniques.lora import adapter, dropout
from tests.parity.test_tp import EVEN, plan

ADAPTERS = Lora(4, 8.0, frozen="fp64", dropout=0.4)
OF = replace(plan("ddp", 1, 2, sequence=True, remat="full"), lora=ADAPTERS)
PLANS = {
    "sequence": OF,
    "whole": replace(OF, sequence_parallel=False),
    "selective": replace(plan("ddp", 1, 2, sequence=True, remat="selective"), lora=ADAPTERS),
    "selective, whole": replace(plan("ddp", 1, 2, sequence=False, remat="selective"), lora=ADAPTERS),
    "four ranks": replace(plan("ddp", 1, 4, sequence=True, remat="full"), lora=ADAPTERS),
    "accumulation": replace(plan("ddp", 1, 2, sequence=True, remat="full", accumulation=2), lora=ADAPTERS),
    "magnitudes": replace(OF, lora=replace(ADAPTERS, dora=True)),
}
LAYERS = 7
"""Of a block, in each of which an adapter drops."""
Masks = list[tuple[bool, Tensor]]


def masks(rank: int, world: int, of: Plan, alike: bool = False) -> Masks:
    """Of each call in one step, in order: whether ranks hold different columns there, and what was kept. ``alike``: a
    fault, all ranks draw the same for these too."""
    drawn: Masks = []
    dropped = dropout.dropped

    def record(x: Tensor, share: float, place: int | None = None) -> Tensor:
        out = dropped(torch.ones_like(x), share, None if alike else place)
        drawn.append((place is not None, out > 0))
        return x * out

    with patch.object(adapter, "dropped", record):
        parity.take_steps(rank, EVEN, of, 1)
    return drawn


def passes_of(drawn: Masks, of: Plan) -> list[tuple[Masks, Masks]]:
    """Of each micro-batch, those of its forward and those that are made again."""
    count = len(drawn) // of.batch.accumulation
    assert len(drawn) == count * of.batch.accumulation and count == 2 * LAYERS * EVEN.num_hidden_layers
    found = [drawn[start : start + count] for start in range(0, len(drawn), count)]
    return [(masks[: count // 2], masks[count // 2 :]) for masks in found]


def cut_masks_differ(found: list[Masks]) -> bool:
    """Whether those for different columns do between any two ranks, once those for what all ranks hold were seen to be
    the same."""
    differ = True
    for first, second in combinations(found, 2):
        assert [cut for cut, _ in first] == [cut for cut, _ in second]
        pairs = [(cut, a, b) for (cut, a), (_, b) in zip(first, second, strict=True)]
        assert {cut for cut, _, _ in pairs} == {False, True}
        assert all(torch.equal(a, b) for cut, a, b in pairs if not cut)
        differ &= all(not torch.equal(a, b) for cut, a, b in pairs if cut)
    return differ


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", PLANS)
def test_masks_of_ranks(ranks: RankPool, name: str) -> None:
    """The same for what all hold, others for different columns; blocks, which are recomputed in reverse order, drop the
    same again; and no two micro-batches drop alike."""
    of = PLANS[name]
    found = ranks.run(masks, of, world=of.layout.world)
    assert cut_masks_differ(found)
    for drawn in found:
        passes = passes_of(drawn, of)
        for forward, again in passes:
            blocks = [forward[start : start + LAYERS] for start in range(0, len(forward), LAYERS)]
            expected = [mask for block in reversed(blocks) for mask in block]
            assert all(torch.equal(a, b) for (_, a), (_, b) in zip(expected, again, strict=True))
        for (one, _), (other, _) in combinations(passes, 2):
            assert not any(torch.equal(a, b) for (_, a), (_, b) in zip(one, other, strict=True))


def test_masks_that_are_drawn_alike_are_seen(ranks: RankPool) -> None:
    assert not cut_masks_differ(ranks.run(masks, OF, True, world=2))
