"""Parity must see what is wrong in a pipeline: faults planted into the ranks' code. (What drift must see of one stands
in tests/prove/planted.py.)"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise import techniques
from shardwise.distributed.meshes import Meshes
from shardwise.models import init
from shardwise.models.config import ModelSpec
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.runtime import reduce
from shardwise.runtime.pipeline import Passed, PipelineRank
from shardwise.spec.plan import Plan
from shardwise.techniques import pp
from shardwise.techniques.pp.actions import Action, Lists
from tests.parity import planted
from tests.parity.pipes import plan, spec_of
from tests.parity.planted import Fault
from tests.techniques.pp.replays import replay

before_micro_batch, orders, after_backward = techniques.before_micro_batch, pp.orders, pp.after_backward
take, combine, fill = PipelineRank._take, reduce.combine, init.fill
TWO, FOUR = spec_of("untied", 2), spec_of("untied", 4)
TIED_TWO, TIED_FOUR = spec_of("tied", 2), spec_of("tied", 4)


def scaled(self: PipelineRank[Any], letter: Any, action: Action) -> Passed:
    """As where every stage multiplies by the loss's scale again."""
    found = take(self, letter, action)
    return tuple(each * 2.0 for each in found) if letter == "B" else found


@contextmanager
def one_too_early() -> Iterator[None]:
    """The last stage takes the micro-batch before the last for the last: what comes after is not reduced."""
    calls = Counter[int]()

    def before(parts: Sequence[nn.Module], plan: Plan, *, last: bool) -> None:
        line = pp.line_of(parts)
        if line is not None and line.rank_kind.head:
            [part] = parts
            calls[id(part)] += 1
            last = calls[id(part)] % plan.batch.accumulation == plan.batch.accumulation - 1
        before_micro_batch(parts, plan, last=last)

    with patch.object(techniques, "before_micro_batch", before):
        yield


def summed_twice(parts: Sequence[nn.Module], plan: Plan, meshes: Meshes) -> None:
    after_backward(parts, plan, meshes)
    after_backward(parts, plan, meshes)


def swapped(lists: Lists) -> Lists:
    """The first two sends of the first rank that come one after another and are of two of its stages."""
    order = list(lists[0])
    sends = [place for place, action in enumerate(order) if action.kind == "SEND_F"]
    for one, other in [p for p in pairwise(sends) if order[p[0]].stage != order[p[1]].stage][:1]:
        order.insert(other, order.pop(one))
    return (tuple(order), *lists[1:])


def of_one_stage(meshes: Meshes, squares: Tensor, loss: Tensor, *figures: Tensor, **counted: Tensor) -> Tensor:
    numbers = combine(meshes, squares, loss, *figures, **counted)
    own = squares.clone().reshape(1)
    meshes.sum(own, "stage")
    return torch.cat([own, numbers[1:]])


def alike(name: str, shape: Sequence[int], part: Sequence[slice], seed: int, spec: ModelSpec) -> Tensor:
    """Blocks counted from the first of their stage, of which there are two."""
    own = re.sub(r"(?<=layers\.)\d+", lambda found: str(int(found[0]) % (spec.num_hidden_layers // 2)), name)
    return fill(own, shape, part, seed, spec)


FAULTS: dict[str, Fault] = {
    "the loss is scaled once a stage": (
        lambda: patch.object(PipelineRank, "_take", scaled),
        FOUR,
        plan("1f1b", FOUR, pp=4),
    ),
    "a stage's last micro-batch is not reduced": (lambda: one_too_early(), TWO, plan("1f1b", TWO, dp_replicate=2)),
    "a stage's last micro-batch is not reduced, of shards": (
        lambda: one_too_early(),
        TWO,
        plan("1f1b", TWO, "zero1", dp_shard=2),
    ),
    "the gradients of tied ends are not summed": (
        lambda: patch.object(pp, "tied_ends", lambda parts: []),
        TIED_TWO,
        plan("1f1b", TIED_TWO),
    ),
    "the gradients of tied ends are summed twice": (
        lambda: patch.object(pp, "after_backward", summed_twice),
        TIED_TWO,
        plan("1f1b", TIED_TWO),
    ),
    "the gradients of tied ends of one rank are not summed": (
        lambda: patch.object(pp, "tied_ends", lambda parts: []),
        TIED_FOUR,
        plan("zbv", TIED_FOUR),
    ),
    "the gradients of tied ends of one rank are summed twice": (
        lambda: patch.object(pp, "after_backward", summed_twice),
        TIED_FOUR,
        plan("zbv", TIED_FOUR),
    ),
    "what two stages of a rank send is swapped": (
        lambda: patch.object(pp, "orders", lambda plan, trained: swapped(orders(plan, trained))),
        FOUR,
        plan("interleaved", FOUR),
    ),
    "the norm is of one stage": (lambda: patch.object(reduce, "combine", of_one_stage), TWO, plan("1f1b", TWO)),
    "every stage draws the same weights": (
        lambda: patch.object(init, "fill", alike),
        FOUR,
        plan("gpipe", FOUR),
    ),
}


def train_with_faults(rank: int, world: int, names: list[str]) -> list[tuple[parity.Trace, parity.Trace]]:
    return planted.take_steps(rank, [FAULTS[name] for name in names])


@pytest.mark.matrix
@pytest.mark.parametrize("name", FAULTS)
def test_every_planted_fault_is_caught(ranks: RankPool, name: str) -> None:
    world = FAULTS[name][2].layout.world
    planted.all_seen({name: FAULTS[name]}, ranks.run(train_with_faults, [name], world=world))


def test_a_replay_sees_swapped_sends_too() -> None:
    of = plan("interleaved", FOUR)
    lists = orders(of, (True,) * 4)
    replay(lists, lambda action: 1.0)
    with pytest.raises(ValueError, match="rank 0 sends rank 1"):
        replay(swapped(lists), lambda action: 1.0)
