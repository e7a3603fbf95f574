"""Parity must see what is wrong in tensor parallelism: faults planted into the ranks' code. Gradients are compared,
since Adam hides a constant factor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, distributed, nn

from shardwise.distributed import collectives
from shardwise.distributed.slices import local
from shardwise.prove import parity
from shardwise.prove.pool import RankFailure, RankPool
from shardwise.runtime import reduce
from shardwise.spec.plan import Lora
from shardwise.techniques import product, states, tp
from shardwise.techniques.states import Division, State
from tests.parity import planted
from tests.parity.cases import TIED
from tests.parity.planted import Fault
from tests.parity.test_tp import EVEN, plan

state = states.state
WHOLE, SEQUENCE = (plan("ddp", 1, 2, sequence=sequence) for sequence in (False, True))


def key_heads_are_whole(name: str, how: Division) -> State:
    return State() if ".k." in name or ".v." in name else state(name, how)


def norms_are_whole(name: str, how: Division) -> State:
    return state(name, how._replace(sequence_parallel=False))


def biased(layer: nn.Linear, dtype: torch.dtype) -> Tensor | None:
    return None if layer.bias is None else product.share_of(layer).used(local(layer.bias).to(dtype))


def own_sum(stream: Tensor, group: Any, tokens: Any = None) -> Tensor:
    return stream.view_as(stream)


def summed_in_place(partial: Tensor, group: Any) -> Tensor:
    """Of a product that selective recomputation has saved, and sums again."""
    distributed.all_reduce(partial, group=group)
    return partial


def sides_swapped(name: str, how: Division) -> State:
    found = state(name, how)
    other = {None: None, 0: 1, 1: 0}[found.dim]
    return State(other, found.partial) if ".lora_b." in name else found


FAULTS: dict[str, Fault] = {
    "norms' gradients are not summed over tokens": (
        lambda: patch.object(tp, "state", norms_are_whole),
        EVEN,
        SEQUENCE,
    ),
    "key heads that all ranks hold are not summed": (
        lambda: patch.object(tp, "state", key_heads_are_whole),
        TIED,
        WHOLE,
    ),
    "the gradient of a column product's input is not reduced": (
        lambda: patch.object(collectives, "enter", own_sum),
        EVEN,
        WHOLE,
    ),
    "what every rank holds counts once for each in the norm": (
        lambda: patch.object(reduce, "replication", lambda tensor, ranks: 1),
        EVEN,
        WHOLE,
    ),
    "a product that is saved is summed in place": (
        lambda: patch.object(collectives, "summed", summed_in_place),
        EVEN,
        plan("ddp", 1, 2, sequence=False, remat="selective"),
    ),
    "every rank adds the bias of a row product": (lambda: patch.object(product, "bias_of", biased), TIED, WHOLE),
}


def train_with_faults(rank: int, world: int, names: list[str]) -> list[tuple[parity.Trace, parity.Trace]]:
    return planted.take_steps(rank, [FAULTS[name] for name in names])


@pytest.mark.prove
def test_every_planted_fault_is_caught(ranks: RankPool) -> None:
    planted.all_seen(FAULTS, ranks.run(train_with_faults, list(FAULTS), world=2))


def adapted_with_b_cut_on_the_wrong_side(rank: int, world: int) -> None:
    with patch.object(tp, "state", sides_swapped):
        parity.take_steps(rank, EVEN, replace(WHOLE, lora=Lora(4, 8.0, frozen="fp64")), 1)


def test_an_adapters_b_that_is_cut_on_the_wrong_side_is_caught(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="shape"):
        ranks.run(adapted_with_b_cut_on_the_wrong_side, world=2)
