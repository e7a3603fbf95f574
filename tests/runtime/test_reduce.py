"""The global norm, clipping, and what all ranks agree on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.models.decoder import Decoder
from shardwise.prove.pool import RankPool
from shardwise.runtime import reduce
from shardwise.spec.layout import Layout, cut
from shardwise.spec.plan import Batch, Plan, Shard
from tests.parity.cases import TIED
from tests.runtime import rank_work

LAYOUTS = {
    "ddp": (2, Layout(dp_replicate=2), "ddp"),
    "zero3": (2, Layout(dp_shard=2), "zero3"),
    "zero3 over 4": (4, Layout(dp_shard=4), "zero3"),
    "hsdp": (4, Layout(dp_replicate=2, dp_shard=2), "zero3"),
}


def plan_of(layout: Layout, strategy: str, accumulation: int = 1) -> Plan:
    shard = Shard(strategy=strategy)  # type: ignore[arg-type]
    micro = rank_work.ROWS // layout.dp // accumulation
    return rank_work.fp64(Plan(layout=layout, shard=shard, batch=Batch(micro, accumulation, rank_work.LENGTH, 7)))


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_norm_and_clipping_equal_torchs(ranks: RankPool, name: str) -> None:
    """On shards of uneven sizes with tied weights; 1e-12 in fp64 is the order of summation."""
    world, layout, strategy = LAYOUTS[name]
    model = Decoder(TIED).double()
    for key, parameter in model.named_parameters():
        parameter.grad = rank_work.gradient(key, tuple(parameter.shape))
    expected = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    for norm, grads in ranks.run(rank_work.norm_and_clip, plan_of(layout, strategy), 0.5, world=world):
        assert norm == pytest.approx(expected, rel=1e-12)
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(grads[key], parameter.grad, rtol=1e-12, atol=0)


def test_a_norm_below_the_limit_changes_nothing() -> None:
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.full((4,), 0.1)
    reduce.scale_gradients([weight, weight], reduce.clip_factor(torch.tensor(0.2), 1.0))
    assert torch.equal(weight.grad, torch.full((4,), 0.1))
    assert reduce.clip_factor(torch.tensor(5.0), None) == 1.0


def test_a_parameter_that_is_given_twice_counts_and_is_scaled_once() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
    weight.grad = torch.full((4,), 3.0, dtype=torch.float64)
    assert float(reduce.local_squares([weight, weight], 1)) == 36.0
    reduce.scale_gradients([weight, weight], torch.tensor(0.5))
    assert torch.equal(weight.grad, torch.full((4,), 1.5, dtype=torch.float64))


def test_bf16_gradients_are_summed_in_fp32() -> None:
    """4,096 ones: a sum in bf16 stops at 256, the exact one is 4,096."""
    weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    weight.grad = torch.ones(4096, dtype=torch.bfloat16)
    assert float(reduce.local_squares([weight], 1)) == pytest.approx(4096.0, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_many_numbers_is_not_off(dtype: torch.dtype) -> None:
    """As of an embedding that a host updates: sums of millions of squares, one after another in fp32, are 4e-4 short.
    The last piece is shorter. 1e-6: fp32, over a few thousand squares."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.empty(3001, 4099, dtype=dtype))
    weight.grad = torch.randn(3001, 4099).to(dtype)
    assert float(reduce.local_squares([weight], 1)) == pytest.approx(float(weight.grad.double().square().sum()), 1e-6)


@pytest.mark.parametrize(("bad", "stopping"), [(None, None), (0, None), (1, 0), (None, 1)])
def test_every_rank_reaches_the_same_verdict(ranks: RankPool, bad: int | None, stopping: int | None) -> None:
    answers = ranks.run(rank_work.verdicts, bad, stopping, world=2)
    assert answers == [(bad is None, stopping is not None, 3)] * 2


@pytest.mark.parametrize(("replicas", "world"), [(1, 2), (1, 3), (1, 4), (2, 4)])
@pytest.mark.parametrize("shape", [(7, 3), (2, 5), (1,), (9,), (4, 2, 3)])
def test_slices_are_those_of_fsdp(ranks: RankPool, replicas: int, world: int, shape: tuple[int, ...]) -> None:
    assert all(ranks.run(rank_work.slices_fit, replicas, shape, world=world))


def test_pieces_cover_a_range_once() -> None:
    for length in range(12):
        for pieces in range(1, 6):
            parts = [cut((3, 3 + length), pieces, index) for index in range(pieces)]
            assert [n for start, stop in parts for n in range(start, stop)] == list(range(3, 3 + length))


@pytest.mark.parametrize("stopping", [0, 3])
def test_what_ranks_read_alike_is_counted_once(ranks: RankPool, stopping: int) -> None:
    """Tokens, losses and figures once for each group of tensor parallelism; squares of all ranks; a wish of any."""
    assert ranks.run(rank_work.counted, stopping, world=4) == [(21, True, [4.0, 0.5, 6.0])] * 4
