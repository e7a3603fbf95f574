"""Parity must see what is wrong in context parallelism: faults planted into the ranks' code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed.meshes import Meshes
from shardwise.models import blockwise
from shardwise.models.config import with_fields
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.runtime import reduce, step
from shardwise.spec.plan import Batch, Plan, Shard
from shardwise.spec.rows import RowShare, TokenRun, WholeRows
from shardwise.techniques.cp import delta_states, exchange, ring_attention
from shardwise.techniques.cp import parts as calls
from tests.parity import planted
from tests.parity.cases import FP64
from tests.parity.mixers import NETS
from tests.parity.planted import Fault, Planted
from tests.parity.rings import DENSE, MODELS
from tests.techniques import cp_ranks
from tests.techniques.cp_ranks import Asked, dense, error

parts, keys, cut, counts = calls.parts, exchange.RingExchange.keys, MicroBatch.cut, reduce.count_supervised
part_attention, passed, places = ring_attention.attention, delta_states.passed_states, delta_states.RowPieces.alike


def ring(cp: int = 2, **more: Any) -> Plan:
    """Two rows, of one micro-batch."""
    plan = Plan(batch=Batch(2, 1, 48, loss_chunk_tokens=7), shard=Shard("ddp", bucket_bytes=4096), precision=FP64)
    return replace(plan, layout=replace(plan.layout, cp=cp), **more)


def side_by_side(rows: WholeRows, row: int, ranks: int) -> tuple[tuple[TokenRun, ...], ...]:
    size = rows.length // ranks
    return tuple((TokenRun(rank * size, (rank + 1) * size),) for rank in range(ranks))


def of_pieces_side_by_side(*args: Any) -> tuple[calls.KernelCall, ...]:
    with patch.object(calls, "held", side_by_side):
        return parts.__wrapped__(*args)


def blind_to_documents(rows: WholeRows, *args: Any) -> tuple[calls.KernelCall, ...]:
    return parts(WholeRows(rows.length), *args)


def from_the_piece(*args: Any) -> tuple[calls.KernelCall, ...]:
    """As if every piece of keys ended where the queries begin."""
    found = parts(*args)
    return tuple(one if one.apart is None else one._replace(apart=one.keys.length) for one in found)


def a_step_late(self: exchange.RingExchange, own: Tensor) -> Iterator[tuple[int, Tensor | None]]:
    before = own
    for owner, there in keys(self, own):
        yield owner, there if there is None or owner == self.rank else before
        before = own if there is None else there


def rounded(*args: Any) -> tuple[Tensor, Tensor]:
    out, lse = part_attention(*args)
    return out, lse.bfloat16().to(lse.dtype)


def none_before(*args: Any) -> Tensor:
    """As if every piece began a row, and none followed."""
    return torch.zeros_like(passed(*args))


def by_ranks(self: delta_states.RowPieces) -> Iterator[tuple[slice, list[delta_states.Place]]]:
    for rows, order in places(self):
        yield rows, sorted(order)


def with_local_positions(self: MicroBatch, share: RowShare) -> MicroBatch:
    found = cut(self, share)
    return replace(found, positions=torch.arange(found.ids.shape[1]).expand_as(found.ids))


def of_every_rank(meshes: Meshes, tokens: int, stop: bool = False) -> tuple[int, bool]:
    total, stops = counts(meshes, tokens, stop)
    return total * meshes.size("cp"), stops


def own_tokens(meshes: Meshes, tokens: int, stop: bool = False) -> tuple[int, bool]:
    return max(1, tokens), counts(meshes, tokens, stop)[1]


@contextmanager
def sunk_each_time() -> Iterator[None]:
    """Sinks take part in the softmax of every block of keys."""

    def part(*args: Any) -> tuple[Tensor, Tensor]:
        out, lse = part_attention(*args)
        sinks = torch.linspace(-2, 3, out.shape[1], dtype=lse.dtype)
        return blockwise.with_sinks(out, lse, sinks)

    with patch.object(ring_attention, "attention", part):
        yield


TWO, FOUR = ring(), ring(4)
WINDOWED = with_fields(DENSE, sliding_window=30)
FAULTS: dict[str, Fault] = {
    "a rank takes its pieces for others than it has": (
        lambda: patch.object(ring_attention, "parts", of_pieces_side_by_side),
        DENSE,
        TWO,
    ),
    "tokens count once for each rank that shares rows": (
        lambda: patch.object(reduce, "count_supervised", of_every_rank),
        DENSE,
        TWO,
    ),
    "C2: each rank that shares rows divides by its own tokens": (
        lambda: patch.object(reduce, "count_supervised", own_tokens),
        DENSE,
        TWO,
    ),
    "what ranks that share rows hold alike counts once for each in the norm": (
        lambda: patch.object(step.reduce, "replication", lambda tensor, ranks: 1),
        DENSE,
        TWO,
    ),
    "a document is seen across a border": (
        lambda: patch.object(ring_attention, "parts", blind_to_documents),
        DENSE,
        TWO,
    ),
    "positions are those in the piece": (lambda: patch.object(MicroBatch, "cut", with_local_positions), DENSE, TWO),
    "a window is measured from the piece": (
        lambda: patch.object(ring_attention, "parts", from_the_piece),
        WINDOWED,
        TWO,
    ),
    "keys are those of the step before": (
        lambda: patch.object(exchange.RingExchange, "keys", a_step_late),
        DENSE,
        FOUR,
    ),
    "log-sum-exps are joined in bf16": (lambda: patch.object(ring_attention, "attention", rounded), DENSE, TWO),
    "the state of the piece before is lost": (
        lambda: patch.object(delta_states, "passed_states", none_before),
        NETS,
        TWO,
    ),
    "states pass in the order of ranks": (lambda: patch.object(delta_states.RowPieces, "alike", by_ranks), NETS, TWO),
}
OF_ATTENTION: dict[str, Planted] = {"sinks count once a step": sunk_each_time}


def train_with_faults(rank: int, world: int, names: list[str]) -> list[tuple[parity.Trace, parity.Trace]]:
    return planted.take_steps(rank, [FAULTS[name] for name in names])


@pytest.mark.prove
@pytest.mark.parametrize("world", [2, 4])
def test_every_planted_fault_is_caught(ranks: RankPool, world: int) -> None:
    faults = {name: fault for name, fault in FAULTS.items() if fault[2].layout.world == world}
    planted.all_seen(faults, ranks.run(train_with_faults, list(faults), world=world))


def test_sinks_that_count_once_a_step_are_caught(ranks: RankPool) -> None:
    asked = Asked("ring", 2, sinks=True)
    answers = ranks.run(cp_ranks.each, [asked], "sinks count once a step", world=2)
    assert error(asked, [answer[0] for answer in answers], dense(asked))["out"] > 1e-3


def test_the_models_are_those_that_parity_proves() -> None:
    assert DENSE in MODELS.values()
