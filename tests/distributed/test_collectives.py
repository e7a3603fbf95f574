"""What tensor-parallel ranks send at the edges of a pair of products, against one process."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.distributed.fake_world import fake_world
from shardwise.prove.fake_run import WorldCounter
from shardwise.prove.pool import RankPool
from shardwise.spec.layout import Layout
from tests.distributed import collective_ranks as crossings

EVEN, ODD = (2, 4), (1, 5)
"""Tokens that 2 and 4 ranks divide, and tokens that neither does."""


def nearest(answers: list[list[torch.Tensor]], tokens: tuple[int, ...], cut: bool, dtype: torch.dtype) -> float:
    """The largest difference on any rank, over the size of what is expected."""
    return max(
        float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-300))
        for rank, answer in enumerate(answers)
        for ours, theirs in zip(answer, crossings.expected(rank, len(answers), tokens, cut, dtype), strict=True)
    )


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("tokens", [EVEN, ODD])
@pytest.mark.parametrize("how", ["plain", "full", "selective"])
def test_a_pair_of_products_is_that_of_one_process(
    ranks: RankPool, how: str, tokens: tuple[int, ...], cut: bool
) -> None:
    """fp64: only the order of additions differs."""
    for world in (2, 4):
        answers = ranks.run(crossings.ours, how, tokens, cut, world=world)
        assert nearest(answers, tokens, cut, torch.float64) < 1e-14


@pytest.mark.prove
@pytest.mark.parametrize("cut", [False, True])
def test_compiled(ranks: RankPool, cut: bool) -> None:
    """In one graph, the collectives in it, gradients included."""
    answers = ranks.run(crossings.ours, "compiled", ODD, cut, world=2)
    assert nearest(answers, ODD, cut, torch.float64) < 1e-14


@pytest.mark.parametrize("cut", [False, True])
def test_narrow_tensors(ranks: RankPool, cut: bool) -> None:
    """fp32 and bf16, within a few of their roundings."""
    for dtype in (torch.float32, torch.bfloat16):
        answers = ranks.run(crossings.ours, "plain", ODD, cut, dtype, world=2)
        assert all(tensor.dtype == dtype for answer in answers for tensor in answer)
        assert nearest(answers, ODD, cut, dtype) < 4 * torch.finfo(dtype).eps


def test_a_sum_in_place_is_wrong_under_selective_recompute(ranks: RankPool) -> None:
    """The trap for which nothing is summed in place: the saved product already is the sum, and is summed again."""
    answers = ranks.run(crossings.ours, "in place", EVEN, False, world=2)
    assert nearest(answers, EVEN, False, torch.float64) > 0.01


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("tokens", [EVEN, ODD])
def test_each_is_the_adjoint_of_its_backward(ranks: RankPool, tokens: tuple[int, ...], cut: bool) -> None:
    """<A x, y> = <x, A' y>, and leave is enter's adjoint."""
    for answer in ranks.run(crossings.products, tokens, cut, world=2):
        assert answer == pytest.approx([answer[0]] * 4, rel=1e-13)


def test_without_gradients(ranks: RankPool) -> None:
    assert all(ranks.run(crossings.unrecorded, world=2))


@pytest.mark.parametrize("cut", [False, True])
def test_what_is_sent(cut: bool) -> None:
    """On a fake group of 8 ranks and fake tensors: once forward and once backward at each edge, of the whole stream,
    filled up."""
    with fake_world(Layout(tp=8)) as groups:
        tracker = WorldCounter(FakeTensorMode(), groups.called())
        with tracker.fake, tracker:  # type: ignore[union-attr]
            stream = torch.empty((1, 6) if cut else (1, 5, 6), requires_grad=True)
            column, row = torch.empty(1, 6, requires_grad=True), torch.empty(6, 1, requires_grad=True)
            out = crossings.block(stream, column, row, groups.groups["tp"], ODD if cut else None)
            out.sum().backward()
    kinds = {"all_gather": 2, "reduce_scatter": 2} if cut else {"all_reduce": 2}
    size = (8 if cut else 5) * 6 * 4
    assert tracker.sent == Counter({("tp", kind, size): count for kind, count in kinds.items()})
