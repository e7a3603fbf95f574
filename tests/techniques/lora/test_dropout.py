"""Which elements tensor-parallel ranks drop."""

from __future__ import annotations

import pytest
import torch

from shardwise.prove.pool import RankPool
from shardwise.techniques.lora.dropout import dropped
from tests.techniques.lora import dropout_ranks as draws


@pytest.mark.matrix(4)
@pytest.mark.parametrize("how", ["plain", "full", "selective", "compiled"])
def test_masks_of_ranks_and_of_recomputation(ranks: RankPool, how: str) -> None:
    """Alike where ranks hold the same tensor, before and after one of which they hold parts, where they are
    independent: they agree on as many elements as chance has it, within 5 standard deviations. Backward drops what
    forward dropped, recomputed or not."""
    chance = draws.SHARE**2 + (1 - draws.SHARE) ** 2
    spread = 5 * (chance * (1 - chance) / (64 * 100)) ** 0.5
    for cut in (False, True):
        answers = ranks.run(draws.masks, how, cut, world=2)
        assert all(torch.equal(forward, backward) for forward, backward in answers)
        (one, _), (two, _) = answers
        agree = (one == two).double().mean((1, 2)).tolist()
        assert agree[0] == agree[2] == 1.0 and (abs(agree[1] - chance) < spread if cut else agree[1] == 1.0)
        for mask in (*one, *two):
            assert abs(float(mask.double().mean()) - 0.6) < 5 * (0.24 / 6400) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_part_is_scaled_as_a_whole_is(dtype: torch.dtype) -> None:
    x = torch.full((1000,), 3.0, dtype=dtype, requires_grad=True)
    out = dropped(x, 0.25, 1)
    out.sum().backward()
    whole = dropped(x.detach(), 0.25)
    assert out.dtype == dtype and torch.equal(out.unique(), whole.unique())
    assert torch.equal(out > 0, x.grad > 0) and torch.equal(x.grad.unique(), whole.unique() / 3)


def test_the_next_draw_is_another() -> None:
    x = torch.ones(1000)
    assert not torch.equal(dropped(x, 0.5, 0), dropped(x, 0.5, 0))
