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
from shardwise.distributed import collectives
from shardwise.models import delta
from shardwise.prove.pool import RankPool
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.techniques import states, tp
from shardwise.techniques.cp import ring_attention as cp_attention
from tests.parity import drawn, planted, routers
from tests.parity.mixers import CASES, DEEPSEEK, DENSE, NEXT, OF_LATENTS, PLANS, case
from tests.parity.planted import Fault
from tests.parity.test_fp64 import holds
from tests.said import shows


@pytest.mark.matrix(8)
@pytest.mark.parametrize("name", CASES)
def test_ranks_are_one_process(ranks: RankPool, name: str) -> None:
    spec, of = case(name)
    holds(drawn.prove(ranks, spec, [of], 3), [of])


use, state, apart, taps = states.use, states.state, cp_attention._apart, delta._taps


def of_latents(name: str) -> bool:
    return "_a" in name.rpartition(".")[0]


def latents_are_whole(name: str, how: states.Division) -> Any:
    """The gradients of q_a and kv_a, each of a rank's own tokens, are taken for whole."""
    return state(name, how._replace(sequence_parallel=False) if of_latents(name) else how)


def latents_on_the_stream(name: str, how: states.Division) -> Any:
    """The same of kv_a where each rank computes it of all tokens, for its own heads."""
    return "stream" if of_latents(name) else use(name, how)


def latents_of_heads(name: str, how: states.Division) -> Any:
    """The gradients of q_a and kv_a are taken for those of a rank's heads, after these were summed."""
    return "own" if of_latents(name) else use(name, how)


def not_summed(parts: Any, group: Any, tokens: Any = None) -> Any:
    """The gradients of latents are those of a rank's heads."""
    return parts


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
    "latents' gradients are not summed over tokens": (
        lambda: patch.object(tp, "state", latents_are_whole),
        DEEPSEEK,
        PLANS["tp"],
    ),
    "latents' gradients are not summed over heads": (
        lambda: patch.object(states, "use", latents_on_the_stream),
        DENSE,
        replace(PLANS["tp"], sequence_parallel=False),
    ),
    "what is made of latents has no sum in backward": (
        lambda: patch.object(collectives, "enter_together", not_summed),
        DEEPSEEK,
        OF_LATENTS["tp, whole"],
    ),
    "latents' gradients are summed twice": (
        lambda: patch.object(states, "use", latents_of_heads),
        DEEPSEEK,
        OF_LATENTS["tp, whole"],
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
    assert problem.code == "PLAN026" and shows(problem.fix, "multiple of 8", 16)
    [problem] = techniques.check(NEXT, routers.plan(cut, length=8, cp_kind="nested"), cluster)
    assert problem.code == "PLAN026" and shows(problem.fix, "multiple of 8", "16 or more")
    assert "pieces of 1 tokens" in problem.what
