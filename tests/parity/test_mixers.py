"""Latent attention: N ranks are one process, and faults planted into what ranks do of it are seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.prove.pool import RankPool
from shardwise.techniques import states
from shardwise.techniques.cp import attention as cp_attention
from tests.parity import drawn, planted
from tests.parity.mixers import CASES, DEEPSEEK, PLANS, case
from tests.parity.planted import Fault
from tests.parity.test_fp64 import holds


@pytest.mark.matrix(8)
@pytest.mark.parametrize("name", CASES)
def test_ranks_are_one_process(ranks: RankPool, name: str) -> None:
    spec, of = case(name)
    holds(drawn.prove(ranks, spec, [of], 3), [of])


use, apart = states.use, cp_attention._apart


def latents_on_the_stream(name: str, how: states.Division) -> Any:
    """The gradients of q_a and kv_a are taken for whole."""
    return "stream" if "_a" in name.rpartition(".")[0] else use(name, how)


def mixed_up(both: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Keys begin one element too late."""
    keys, values = apart(both, k)
    return torch.cat([keys[..., 1:], values[..., :1]], -1), values


FAULTS: dict[str, Fault] = {
    "latents' gradients are not summed": (
        lambda: patch.object(states, "use", latents_on_the_stream),
        DEEPSEEK,
        replace(PLANS["tp"], sequence_parallel=False),
    ),
    "keys and values are cut at the wrong place": (
        lambda: patch.object(cp_attention, "_apart", mixed_up),
        DEEPSEEK,
        PLANS["gather"],
    ),
}


def train_with_faults(rank: int, world: int, names: list[str]) -> list[tuple[Any, Any]]:
    torch.manual_seed(rank)
    return planted.take_steps(rank, [FAULTS[name] for name in names])


@pytest.mark.prove
def test_every_planted_fault_is_caught(ranks: RankPool) -> None:
    planted.all_seen(FAULTS, ranks.run(train_with_faults, list(FAULTS), world=2))
