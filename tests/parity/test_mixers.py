"""Latent attention and gated delta nets: N ranks are one process, and faults planted into what ranks do of them are
seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise import techniques
from shardwise.models import delta
from shardwise.prove.pool import RankPool
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.techniques import states
from shardwise.techniques.cp import attention as cp_attention
from tests.parity import drawn, planted, routers
from tests.parity.mixers import CASES, DEEPSEEK, NEXT, PLANS, case
from tests.parity.planted import Fault
from tests.parity.test_fp64 import holds


@pytest.mark.matrix(8)
@pytest.mark.parametrize("name", CASES)
def test_ranks_are_one_process(ranks: RankPool, name: str) -> None:
    spec, of = case(name)
    holds(drawn.prove(ranks, spec, [of], 3), [of])


use, apart, taps = states.use, cp_attention._apart, delta._taps


def latents_on_the_stream(name: str, how: states.Division) -> Any:
    """The gradients of q_a and kv_a are taken for whole."""
    return "stream" if "_a" in name.rpartition(".")[0] else use(name, how)


def mixed_up(both: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Keys begin one element too late."""
    keys, values = apart(both, k)
    return torch.cat([keys[..., 1:], values[..., :1]], -1), values


def norms_on_the_stream(name: str, how: states.Division) -> Any:
    """The gradient of the norm of heads is taken for whole."""
    return "stream" if "head_norm" in name else use(name, how)


def a_token_less(x: Tensor, starts: Tensor | None, count: int) -> Any:
    """The ranks leave out the first of the tokens that are added up."""
    return list(taps(x, starts, count))[: count - 1]


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
    "the norm's gradient is not summed": (
        lambda: patch.object(states, "use", norms_on_the_stream),
        NEXT,
        replace(PLANS["tp"], sequence_parallel=False),
    ),
    "a token of the sums is lost": (lambda: patch.object(delta, "_taps", a_token_less), NEXT, PLANS["tp"]),
}


def train_with_faults(rank: int, world: int, names: list[str]) -> list[tuple[Any, Any]]:
    torch.manual_seed(rank)
    return planted.take_steps(rank, [FAULTS[name] for name in names])


@pytest.mark.prove
def test_every_planted_fault_is_caught(ranks: RankPool) -> None:
    planted.all_seen(FAULTS, ranks.run(train_with_faults, list(FAULTS), world=2))


def test_what_ranks_cannot_share() -> None:
    cluster = parse_cluster("4xCPU")
    [problem] = techniques.check(NEXT, routers.plan(Layout(tp=4)), cluster)
    assert problem.code == "PLAN022" and "4 does not divide `linear_num_key_heads` 2" in problem.what
    cut = Layout(cp=4, ulysses=2)
    [problem] = techniques.check(NEXT, routers.plan(cut, length=20, cp_kind="nested"), cluster)
    assert problem.code == "PLAN026" and "a multiple of 8, such as 16" in problem.fix
    [problem] = techniques.check(NEXT, routers.plan(cut, length=8, cp_kind="nested"), cluster)
    assert problem.code == "PLAN026" and "pieces of 1 tokens" in problem.what and problem.fix == "16 or more"
