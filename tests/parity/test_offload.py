"""The optimizer on the host and on NVMe: a run is bit by bit what it is without, whatever it is beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from shardwise.distributed.slices import gradient_dtype, local
from shardwise.models.config import ModelSpec
from shardwise.prove import moves, parity
from shardwise.prove.pool import RankPool
from shardwise.runtime import reduce
from shardwise.runtime.state import TrainState
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Offload, Pipeline, Plan, Shard
from shardwise.techniques import offload
from shardwise.techniques.offload import host_copies
from shardwise.techniques.offload.host_copies import HostWeights
from shardwise.techniques.offload.legal import leave_early
from shardwise.techniques.offload.scratch import Scratch, aligned
from tests.drift.compiled import compiler
from tests.parity import drawn
from tests.parity.cases import FP64, SEQ_LEN
from tests.parity.moving import goes_on
from tests.parity.offloading import CASES, FRACTIONS, LAYOUTS, NARROW, Case
from tests.parity.pairwise import DENSE

STEPS = 3
"""The third is the first whose moments are of clipped gradients that differ."""


def without(plan: Plan) -> Plan:
    return replace(plan, offload=Offload())


def test_every_layout_is_met() -> None:
    assert {case.layout for case in CASES} == LAYOUTS.keys()
    assert len(CASES) <= 32
    assert {(leave_early(case.plan), case.fraction) for case in CASES} == {*product((False, True), FRACTIONS)}


def held(state: TrainState) -> dict[str, list[int]]:
    """What a rank holds; that the device has what the host has updated, rounded where it is narrow, is looked at."""
    for parameter, copy in state.host.copies.items() if state.host else ():
        if local(parameter.detach()).untyped_storage().nbytes():  # it does not wait
            assert torch.equal(local(parameter.detach()), local(copy.detach()).to(parameter.dtype))
            assert copy.dtype == gradient_dtype(parameter)
    return known(state)


known = parity.held


def train_on_rank(rank: int, world: int, spec: ModelSpec, plan: Plan) -> list[parity.Trace]:
    with patch.object(parity, "held", held), compiler("aot_eager"):
        return drawn.train_on_rank(rank, world, spec, [plan, without(plan)], STEPS)


def bit_by_bit(ranks: RankPool, spec: ModelSpec, plan: Plan) -> None:
    for found, right in ranks.run(train_on_rank, spec, plan, world=plan.layout.world):
        assert found.losses == right.losses and found.norms == right.norms
        assert found.gradients.keys() == right.gradients.keys()
        assert all(torch.equal(found.gradients[name], value) for name, value in right.gradients.items())
        assert found.held == right.held


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bit_by_bit_what_it_is_without(ranks: RankPool, case: Case) -> None:
    """Losses, norms, first gradients, and all that each rank holds after each step; gradients are clipped."""
    bit_by_bit(ranks, case.spec, case.plan)


@pytest.mark.matrix(8)
@pytest.mark.parametrize("name", NARROW)
def test_of_narrow_weights_too(ranks: RankPool, name: str) -> None:
    bit_by_bit(ranks, *NARROW[name])


@pytest.mark.prove
@pytest.mark.parametrize("name", ["one rank", "sharded, some frozen"])
def test_of_compiled_blocks(ranks: RankPool, name: str) -> None:
    spec, plan = NARROW[name]
    bit_by_bit(ranks, spec, replace(plan, compile=True))


ZERO3 = Plan(Layout(dp_shard=2), Batch(2, 2, SEQ_LEN, 7), Shard("zero3"), FP64, offload=Offload("host"))
ONE = replace(ZERO3, layout=Layout(), batch=Batch(4, 2, SEQ_LEN, 7), shard=Shard())
SUMMED = replace(ZERO3, offload=Offload("host", sums="host"))
STAGED = replace(ONE, layout=Layout(pp=2), pipeline=Pipeline("1f1b", 1, (1, 1)))
ON_NVME = replace(ZERO3, offload=Offload("nvme"))
FOUR = replace(ZERO3, layout=Layout(dp_shard=4), batch=Batch(1, 2, SEQ_LEN, 7))
WITH_WEIGHTS = replace(ZERO3, offload=Offload("nvme", weights="nvme"))
SIDES = (ZERO3, without(ONE), ON_NVME, STAGED, without(FOUR), WITH_WEIGHTS)


@pytest.mark.matrix
@pytest.mark.parametrize("place", range(len(SIDES)))
def test_a_run_goes_on_with_and_without(ranks: RankPool, tmp_path: Path, place: int) -> None:
    targets = [SIDES[(place + step) % len(SIDES)] for step in (0, 1)]
    goes_on(ranks, tmp_path, replace(DENSE, tie_word_embeddings=place % 2 == 1), SIDES[place], targets)


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("source", "target"), [("host", "none"), ("none", "host"), ("nvme", "host"), ("host", "nvme")])
def test_a_narrow_run_goes_on_with_and_without(ranks: RankPool, tmp_path: Path, source: str, target: str) -> None:
    """What is saved are the weights in fp32: bit by bit the run without, before and after."""
    spec, plan = NARROW["one rank"]

    def go(where: str, offload: str, first: int) -> moves.Stretch:
        own, run = replace(plan, offload=Offload(offload)), moves.SavedRun(str(tmp_path / where), first)  # type: ignore[arg-type]
        [found] = ranks.run(moves.go, spec, own, run, drawn.RANDOM, world=1)
        return found

    for first in (0, moves.STEPS):
        found, right = go("with", target if first else source, first), go("without", "none", first)
        assert found.losses == right.losses
        for mine, other in ((found.before, right.before), (found.after, right.after)):
            assert mine.keys() == other.keys() and all(torch.equal(mine[name], value) for name, value in other.items())


def stale(self: HostWeights, parameter: nn.Parameter) -> None:
    """The first gradient that came stays for all steps."""
    room = self._gradients[parameter]
    kept = room.clone() if parameter in self._seen else None  # type: ignore[attr-defined]
    take(self, parameter)
    self._seen.add(parameter)  # type: ignore[attr-defined]
    if kept is not None:
        room.copy_(kept)


@contextmanager
def of_the_last_step() -> Iterator[None]:
    made = HostWeights.__init__

    def begin(self: HostWeights, *given: Any, **more: Any) -> None:
        made(self, *given, **more)
        self._seen = set()  # type: ignore[attr-defined]

    with patch.object(HostWeights, "__init__", begin), patch.object(HostWeights, "_take", stale):
        yield


take = HostWeights._take


def before_the_step() -> AbstractContextManager[Any]:
    """What backward has given comes back as it was: weights return before they are updated."""
    rest = HostWeights.take_rest

    def give_first(self: HostWeights) -> None:
        rest(self)
        give_back(self)

    give_back = HostWeights.give_back
    return patch.multiple(HostWeights, take_rest=give_first, give_back=lambda self: None)


def every_micro_batch() -> AbstractContextManager[Any]:
    """Gradients leave after each micro-batch, the last over the ones before."""
    return patch.object(offload, "before_micro_batch", lambda parts, plan, *, last: None)


@contextmanager
def norm_of_what_stayed() -> Iterator[None]:
    """Clipping by the norm of the device's gradients, of which none is left."""
    known = reduce.local_squares
    with patch.object(reduce, "local_squares", lambda parameters, ranks: known([], ranks)):
        yield


def a_step_late() -> AbstractContextManager[Any]:
    """What is written comes to the file after the next step has read it: that a read may overtake a write."""
    write, held = Scratch.write, dict[tuple[int, int], bytes]()

    def late(self: Scratch, place: int, begin: int, values: memoryview) -> None:
        before = held.get((place, begin))
        held[place, begin] = bytes(values)
        if before is not None:
            room, _ = aligned(len(before))
            room[:] = before
            write(self, place, begin, room)

    return patch.object(Scratch, "write", late)


def nothing_added() -> AbstractContextManager[Any]:
    """Of several micro-batches the sum on the host is the first."""
    return patch.object(host_copies, "_add", lambda room, total, copied: None)


def one_buffer_for_all() -> AbstractContextManager[Any]:
    """What comes is added to what has come into the same buffer, and not to the sum."""
    add = host_copies._add
    return patch.object(host_copies, "_add", lambda room, total, copied: add(room, room, copied))


def as_they_began() -> AbstractContextManager[Any]:
    """The device computes with the weights of the first step."""
    return patch.object(host_copies, "_send", lambda group: None)


def rounded_gradients() -> AbstractContextManager[Any]:
    """As they would come to a weight in bf16 that is not told otherwise."""

    def rounded(self: HostWeights, parameter: nn.Parameter) -> None:
        local(parameter.grad).copy_(local(parameter.grad).bfloat16())  # type: ignore[arg-type]
        take(self, parameter)

    return patch.object(HostWeights, "_take", rounded)


FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], ModelSpec, Plan]] = {
    "the last step's gradient": (of_the_last_step, DENSE, ZERO3),
    "weights that return before the step": (before_the_step, DENSE, ZERO3),
    "gradients that leave after each micro-batch": (every_micro_batch, DENSE, ONE),
    "a norm that misses what has left": (norm_of_what_stayed, DENSE, ZERO3),
    "a read that overtakes a write": (a_step_late, DENSE, ON_NVME),
    "a sum of one micro-batch": (nothing_added, DENSE, SUMMED),
    "a sum in a buffer": (one_buffer_for_all, DENSE, SUMMED),
    "narrow weights that do not return": (as_they_began, *NARROW["one rank"]),
    "shards that do not return": (as_they_began, *NARROW["sharded, some frozen"]),
    "gradients as narrow as their weights": (rounded_gradients, *NARROW["sharded, some frozen"]),
}


def take_steps(rank: int, world: int, name: str) -> tuple[parity.Trace, parity.Trace]:
    planted, spec, plan = FAULTS[name]
    right = drawn.take_steps(rank, spec, without(plan), STEPS)
    with planted():
        return right, drawn.take_steps(rank, spec, plan, STEPS)


@pytest.mark.matrix
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(ranks: RankPool, name: str) -> None:
    """What the proof above compares is not equal."""
    for right, found in ranks.run(take_steps, name, world=FAULTS[name][2].layout.world):
        assert found.held != right.held
