"""``shardwise.certify``: modules of one's own, sharded on ranks, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.errors import ConfigError, UsageError
from shardwise.models.attention import MaskSpec
from shardwise.models.decoder import Decoder
from shardwise.prove.pool import RankFailure
from tests.parity.test_tp import EVEN

ROWS = torch.randn(5, 8, 6, generator=torch.Generator().manual_seed(1))
IDS = torch.randint(67, (5, 8, 12), generator=torch.Generator().manual_seed(2))


class Stack(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 10), nn.Tanh(), nn.Linear(10, width)) for _ in "123")
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return (x * self.scale).square().mean()


class Normed(Stack):
    """With statistics of this rank's rows, as a BatchNorm that is not synchronised."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.std())


def rows(step: int, index: int, count: int) -> tuple[Tensor]:
    return (ROWS[step].chunk(count)[index],)


def tokens(step: int, index: int, count: int) -> tuple[Any, ...]:
    ids = IDS[step].chunk(count)[index]
    return ids, torch.arange(12).expand_as(ids), MaskSpec()


def decoder() -> Decoder:
    return Decoder(EVEN)


def next_token(logits: Tensor, given: tuple[Tensor, ...]) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), given[0][:, 1:].flatten())


@pytest.mark.prove
@pytest.mark.parametrize(
    ("strategy", "degrees"),
    [("zero3", {"processes": 2}), ("ddp", {"processes": 2}), ("zero1", {"processes": 2}), ("hsdp", {"processes": 4})],
)
def test_a_module_that_can_be_sharded(strategy: Any, degrees: dict[str, int]) -> None:
    found = shardwise.certify(Stack, shardwise.plan(strategy, recompute="full", **degrees), rows)  # type: ignore[arg-type]
    assert found, found
    assert f"over {degrees['processes']} ranks: holds" in str(found)


@pytest.mark.prove
def test_the_decoder_over_tensor_parallel_ranks() -> None:
    found = shardwise.certify(decoder, shardwise.plan("zero3", tp=2, processes=4), tokens, next_token)
    assert found, found


def test_statistics_of_a_rank_are_found() -> None:
    found = shardwise.certify(Normed, shardwise.plan("ddp", processes=2), rows)
    assert not found
    assert any("first gradient of" in line and "expected" in line for line in found.problems)
    assert "does not hold" in str(found)


def test_functions_that_ranks_cannot_import() -> None:
    with pytest.raises(UsageError, match="top of a file"):
        shardwise.certify(lambda: Stack(), shardwise.plan("ddp", processes=2), rows)


@pytest.mark.prove
def test_a_rank_that_raises() -> None:
    with pytest.raises(RankFailure, match="narrow"):
        shardwise.certify(Narrow, shardwise.plan("ddp", processes=2), rows)


class Narrow(Stack):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("narrow")


def test_a_plan_for_other_processes() -> None:
    assert shardwise.plan("zero3", processes=8, tp=2).layout.world == 8
    with pytest.raises(ConfigError, match="tp 3 does not divide 8 processes"):
        shardwise.plan("zero3", processes=8, tp=3)
