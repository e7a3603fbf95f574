"""Weights that wait on the host or on NVMe: a run is bit by bit what it is without, whatever it is beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from shardwise.distributed.slices import kept
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Offload, Plan, Shard
from shardwise.techniques.offload import host_copies
from shardwise.techniques.offload.weights import StagedBlocks, WaitingWeights
from shardwise.techniques.pp.actions import SCHEDULES
from tests.drift.compiled import compiler
from tests.parity import drawn
from tests.parity.cases import SEQ_LEN
from tests.parity.fetching import CASES, DENSE, EXPERTS, PLACES, Case
from tests.parity.pipes import layout_of, pipeline
from tests.parity.test_waiting import as_planned, differ, same_to_the_bit

STEPS = 2


def without(plan: Plan) -> Plan:
    return replace(plan, offload=replace(plan.offload, weights="none"))


def test_every_layout_is_met() -> None:
    assert {case.layout for case in CASES} == PLACES.keys() and len(CASES) <= 31


@pytest.mark.matrix(16)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bit_by_bit_what_it_is_without(ranks: RankPool, case: Case) -> None:
    same_to_the_bit(ranks, case.spec, case.plan, without(case.plan))


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_held_and_copied(case: Case) -> None:
    for copied in as_planned(case.spec, case.plan):
        assert copied["host", "device"] > 0 and (copied["disk", "host"] > 0) is (case.weights == "nvme")


def compiled_steps(rank: int, world: int, case: Case) -> list[parity.Trace]:
    """With and without."""
    with compiler("aot_eager"):
        return [
            drawn.take_steps(rank, case.spec, replace(plan, compile=True), STEPS)
            for plan in (case.plan, without(case.plan))
        ]


@pytest.mark.big
@pytest.mark.parametrize("layout", ["one rank", "zero3"])
def test_compiled_blocks(ranks: RankPool, layout: str) -> None:
    case = next(case for case in CASES if case.layout == layout and case.frozen == "uneven")
    for found, right in ranks.run(compiled_steps, case, world=case.plan.layout.world):
        assert differ(found, right) == []


@pytest.mark.matrix(6)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(ranks: RankPool, schedule: str) -> None:
    """Trained weights of stages, of two or four blocks each, beside what several micro-batches have kept of them; under
    every other schedule in files."""
    spec = replace(DENSE, num_hidden_layers=8, intermediate_size=96)  # small: fake tensors are in no file
    batch = Batch(1, SCHEDULES[schedule].least_micro_batches(2), SEQ_LEN)
    plan = Plan(layout_of(schedule, 2), batch, **pipeline(schedule, 2, spec))
    tier = ("host", "nvme")[[*SCHEDULES].index(schedule) % 2]
    plan = replace(plan, offload=Offload(tier, weights=tier))  # type: ignore[arg-type]
    same_to_the_bit(ranks, spec, plan, without(plan))
    as_planned(spec, plan)


@pytest.mark.prove
def test_experts_of_blocks_without_backward_stay_away(ranks: RankPool) -> None:
    """The backward of the block after them gathers nothing of them: they have no memory by then."""
    layout, frozen = Layout(dp_shard=4, ep=2), ("embed.*", "layers.0.*", "layers.1.*")
    plan = Plan(layout, Batch(2, 1, SEQ_LEN), Shard("zero3"), frozen=frozen, offload=Offload(weights="host"))
    same_to_the_bit(ranks, EXPERTS, plan, without(plan))
    as_planned(EXPERTS, plan)


def of_another_block() -> AbstractContextManager[Any]:
    """What is copied to a block is the block before it's."""
    copy = WaitingWeights._copy

    def copied(self: WaitingWeights, number: int) -> None:
        own = self._blocks[number]
        before = self._blocks[max(0, number - 1)]
        self._blocks[number] = [(*a[:2], room) for a, (*_, room) in zip(own, before, strict=True)]
        copy(self, number)
        self._blocks[number] = own

    return patch.object(WaitingWeights, "_copy", copied)


@contextmanager
def not_copied_again() -> Iterator[None]:
    """Memory is there again for backward, but what it had is not: here another number."""
    copy = WaitingWeights._copy

    def copied(self: WaitingWeights, number: int) -> None:
        if number not in self._backward:
            copy(self, number)
        else:
            for tensor, *_ in self._blocks[number]:
                tensor.data.fill_(0.25)

    with patch.object(WaitingWeights, "_copy", copied):
        yield


def of_copies() -> AbstractContextManager[Any]:
    """The optimizer updates copies of what waits, which never comes to the device."""
    return patch.object(host_copies, "kept", lambda parameter: kept(parameter).clone())


def from_another_place() -> AbstractContextManager[Any]:
    """Of a file the block before is read."""
    fill = StagedBlocks._fill
    return patch.object(StagedBlocks, "_fill", lambda self, number, *given: fill(self, max(0, number - 1), *given))


def before_it_is_copied() -> AbstractContextManager[Any]:
    """The next block is read into a room out of which the one before is still to be copied."""
    take = StagedBlocks.take

    def taken(self: StagedBlocks, number: int) -> tuple[int, list[Tensor]]:
        room, values = take(self, number)
        self._fill((number + 1) % len(self.sizes), room, None)
        return room, values

    return patch.object(StagedBlocks, "take", taken)


@contextmanager
def not_written() -> Iterator[None]:
    """Updates of weights do not reach the file from which the next forward reads."""
    made = StagedBlocks.__init__

    def begin(self: StagedBlocks, *given: Any, **more: Any) -> None:
        made(self, *given, **more)
        self.scratch.write = lambda *given: None  # type: ignore[method-assign]

    with patch.object(StagedBlocks, "__init__", begin):
        yield


FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str, str]] = {
    "the weights of another block": (of_another_block, "uneven", "host"),
    "nothing copied for backward": (not_copied_again, "uneven", "host"),
    "updates that do not reach what waits": (of_copies, "nothing", "host"),
    "a block from another place of the file": (from_another_place, "nothing", "nvme"),
    "a room that is filled again too early": (before_it_is_copied, "nothing", "nvme"),
    "updates that do not reach the file": (not_written, "nothing", "nvme"),
}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name: str) -> None:
    """What the proof above compares is not equal."""
    plant, frozen, tier = FAULTS[name]
    case = next(case for case in CASES if case.layout == "one rank" and case.frozen == frozen)
    optimizer = tier if frozen == "nothing" else "none"
    plan = replace(case.plan, offload=Offload(optimizer, weights=tier))  # type: ignore[arg-type]
    right = drawn.take_steps(0, case.spec, without(plan), STEPS)
    with plant():
        found = drawn.take_steps(0, case.spec, plan, STEPS)
    assert differ(found, right)
