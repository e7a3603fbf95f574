"""Dropout in adapters under expert parallelism: what other layers than experts drop is the same as without, however
many rows come to a rank. What experts drop follows from the rank that computes them, and is another's; so it is, on a
CPU, for the expert that all tokens share, which is computed at another time."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch import Tensor

from shardwise.models.config import with_fields
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Lora, Plan
from shardwise.techniques.lora import adapter, dropout
from tests.parity.experts import FULL, MOE, plan

SPEC = with_fields(MOE, num_experts=4, shared_expert_size=0, shared_expert_gate=False)
ADAPTERS = Lora(3, 6.0, frozen="fp64", dropout=0.4)


def masks(rank: int, world: int, of: Plan) -> list[Tensor]:
    """What layers that every token goes through keep in one step, in order."""
    drawn: list[Tensor] = []
    dropped = dropout.dropped

    def record(x: Tensor, share: float, place: int | None = None) -> Tensor:
        out = dropped(torch.ones_like(x), share, place)
        if place is None:
            drawn.append(out > 0)
        return x * out

    with patch.object(adapter, "dropped", record):
        parity.take_steps(rank, SPEC, of, 1)
    return drawn


def test_what_other_layers_drop_does_not_depend_on_where_experts_are(ranks: RankPool) -> None:
    alone, spread = (
        ranks.run(masks, plan(Layout(dp_shard=2, ep=ep), "zero3", 2, remat=FULL, lora=ADAPTERS), world=2)
        for ep in (1, 2)
    )
    for one, other in zip(alone, spread, strict=True):
        assert len(one) > 2 * SPEC.num_hidden_layers
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
