"""Embedding and output layer of ranks that hold rows of the vocabulary each, against one process."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from shardwise.distributed import vocabulary
from shardwise.prove.pool import RankPool
from tests.distributed import vocabulary_ranks as rows
from tests.distributed.collective_ranks import share


@pytest.mark.parametrize("sequence", [False, True])
def test_an_embedding_is_the_sum_of_what_each_rank_looks_up(ranks: RankPool, sequence: bool) -> None:
    """Exactly: only one rank's rows are not zero. An id that comes twice has both gradients."""
    weight = rows.tensors(rows.Case())[1].requires_grad_()
    expected = F.embedding(rows.IDS, weight)
    expected.backward(torch.arange(float(expected.numel()), dtype=torch.float64).view_as(expected))
    for world in (2, 4):
        answers = ranks.run(rows.looked_up, sequence, world=world)
        for rank, (out, _) in enumerate(answers):
            whole = expected.detach()
            assert torch.equal(out, share(whole, rank, world) if sequence else whole)
        assert torch.equal(torch.cat([grad for _, grad in answers]), weight.grad)


@pytest.mark.parametrize(
    ("soft_cap", "sequence", "whole"), [(None, False, False), (3.0, True, False), (None, True, True)]
)
def test_one_weight_that_is_looked_up_and_multiplies(
    ranks: RankPool, soft_cap: float | None, sequence: bool, whole: bool
) -> None:
    """Tied: from ids to loss and back, through both edges of the residual stream. By the loss in chunks, and by that of
    whole logits, which every rank computes and which counts once."""
    total, grad = rows.tied_alone(soft_cap)
    for world in (2, 4):
        answers = ranks.run(rows.tied, soft_cap, sequence, whole, world=world)
        assert all(torch.equal(ours, answers[0][0]) for ours, _ in answers)
        torch.testing.assert_close(answers[0][0], total, rtol=1e-13, atol=0)
        gathered = torch.cat([ours for _, ours in answers])
        torch.testing.assert_close(gathered[:29], grad, rtol=1e-12, atol=1e-13)
        assert len(gathered) == 29 + -29 % world and not gathered[29:].any()


@pytest.mark.parametrize("padded", [False, True])
def test_fsdp2_shards_what_is_cut(ranks: RankPool, padded: bool) -> None:
    """On 2 x 2 ranks: the weight that the output layer is called with is cut over tp alone."""
    hidden, weight, labels, _ = rows.tensors(rows.Case())
    hidden, weight = hidden[:2].clone().requires_grad_(), weight.requires_grad_()
    total = F.cross_entropy((hidden @ weight.mT).flatten(0, 1), labels[:2].flatten(), reduction="sum")
    total.backward()
    answers = ranks.run(rows.sharded_too, padded, world=4)
    torch.testing.assert_close(answers[0][0] + answers[2][0], total.detach(), rtol=1e-13, atol=0)
    grads = torch.cat([answers[0][1] + answers[1][1], answers[2][1] + answers[3][1]])
    torch.testing.assert_close(grads, hidden.grad, rtol=1e-12, atol=1e-13)
    for *_, found in answers:
        torch.testing.assert_close(found[:29], weight.grad, rtol=1e-12, atol=1e-13)
        assert not found[29:].any()


def test_a_whole_weight_is_as_it_was() -> None:
    weight = torch.randn(5, 4)
    assert vocabulary.rows(weight, 5) == (weight, None)
    assert torch.equal(vocabulary.look_up(torch.tensor([3, 1]), weight), weight[[3, 1]])
    assert torch.equal(vocabulary.logits(weight, weight), weight @ weight.T)
