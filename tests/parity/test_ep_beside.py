"""The MLP that all tokens share is computed while rows are on their way to experts, and its gradients while theirs come
back: bit by bit as if it were computed after them, and nothing is read before it has come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, distributed

from shardwise.distributed.torch_private import in_backward
from shardwise.models.layers import MLP
from shardwise.models.moe import MoE
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Lora, Pipeline, Plan, Precision, Remat
from shardwise.techniques.ep import dispatch
from tests.parity import drawn
from tests.parity.mixtures import QWEN2
from tests.parity.test_ep_field import plan

SPREAD, STAGED = Layout(dp_shard=2, ep=2), Layout(dp_shard=2, pp=2, ep=2)
BF16 = Precision("bf16")
PLANS: dict[str, Plan] = {
    "zero3": plan(SPREAD, "zero3"),
    "zero3, recomputed, bf16": plan(SPREAD, "zero3", remat=Remat("full"), precision=BF16),
    "zero1, some recomputed": plan(SPREAD, "zero1", remat=Remat("selective")),
    "ddp, recomputed": plan(SPREAD, remat=Remat("full")),
    "tp": plan(Layout(tp=2, ep=2), remat=Remat("selective"), precision=BF16),
    "adapters": plan(SPREAD, "zero3", lora=Lora(2, targets=("gate", "down", "expert_up"))),
    "adapters of the shared expert alone, recomputed": plan(
        SPREAD, "zero3", lora=Lora(2, targets=("gate", "up", "down")), remat=Remat("full")
    ),
    "1f1b": plan(STAGED, "zero3", pipeline=Pipeline("1f1b", 1, (2, 2))),
    "zbv": plan(replace(STAGED, v_shaped=True), "zero1", pipeline=Pipeline("zbv", 2, (1, 1, 1, 1))),
}
SPEC = replace(QWEN2, num_hidden_layers=4)
computed, common, exchange = dispatch.computed_elsewhere, MoE.common, distributed.all_to_all_single


class Late:
    """An exchange of which nothing is there until it is waited for."""

    def __init__(self, out: Tensor, values: Tensor) -> None:
        self.out, self.values = out, values

    def wait(self) -> None:
        self.out.copy_(self.values)


def late(out: Tensor, x: Tensor, come: list[int], sent: list[int], *, group: Any, async_op: bool) -> Late:
    assert async_op
    values = torch.empty_like(out)
    exchange(values, x, come, sent, group=group)
    out.fill_(7)
    return Late(out, values)


def late_exchanges() -> AbstractContextManager[Any]:
    return patch.object(dispatch.dist, "all_to_all_single", late)


def one_after_the_other() -> AbstractContextManager[Any]:
    """What all tokens share is computed when everything has come back."""
    return patch.object(dispatch, "computed_elsewhere", lambda *given: computed(*given[:4]))


PROGRAMS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (nullcontext, one_after_the_other, late_exchanges)


def traces(rank: int, world: int, of: Plan) -> list[tuple[parity.Trace, Counter[tuple[str, int]]]]:
    """Of two steps by each of ``PROGRAMS``; and how often so many exchanges were under way when the shared MLP began
    its forward, the first time, and its backward."""
    found = []
    for program in PROGRAMS:
        seen = Counter[tuple[str, int]]()

        def watched(self: MoE, shared: MLP, x: Tensor, seen: Counter[tuple[str, int]] = seen) -> Tensor:
            seen["forward", len(dispatch.UNDER_WAY)] += not in_backward()
            out = common(self, shared, x)
            if out.requires_grad:
                out.register_hook(lambda grad: seen.update({("backward", len(dispatch.UNDER_WAY)): 1}))
            return out

        with program(), patch.object(MoE, "common", watched):
            found.append((drawn.take_steps(rank, SPEC, of, 2), seen))
        assert not dispatch.UNDER_WAY
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("case", PLANS)
def test_it_is_the_same_bit_by_bit(ranks: RankPool, case: str) -> None:
    """Losses, norms, first gradients and all weights after two steps, on every rank."""
    of = PLANS[case]
    of = replace(of, batch=replace(of.batch, accumulation=2, micro_batch_size=1))
    for (first, beside), (after, alone), (late, waited) in ranks.run(traces, of, world=of.layout.world):
        beside, alone, waited = (+each for each in (beside, alone, waited))
        nothing = {("backward", 0)} if of.lora else set[tuple[str, int]]()  # no gradient of the first layer's input
        assert beside == waited and beside.keys() - nothing == {("forward", 1), ("backward", 1)}
        assert {count for _, count in alone} == {0} and alone.total() == beside.total()
        assert first.gradients and any(".shared." in name for name in first.gradients)
        for other in (after, late):
            assert (other.losses, other.norms, other.held) == (first.losses, first.norms, first.held)
            for one, same in ((first.gradients, other.gradients), (first.weights, other.weights)):
                assert one.keys() == same.keys() and all(torch.equal(one[name], same[name]) for name in one)
