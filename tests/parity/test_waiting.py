"""Inputs of blocks that wait on the host: a run is bit by bit what it is without, whatever it is beside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.prove import parity
from shardwise.prove.drift import drift
from shardwise.prove.pool import RankPool
from shardwise.spec.plan import Offload, Plan
from shardwise.techniques.offload.activations import MovedInputs
from tests.drift.compiled import compiler
from tests.parity import drawn
from tests.parity.waiting import CASES, PLACES, Case

STEPS = 2


def without(plan: Plan) -> Plan:
    return replace(plan, offload=replace(plan.offload, activations="none"))


def test_every_layout_is_met() -> None:
    assert {case.layout for case in CASES} == PLACES.keys() and len(CASES) <= 30


def differ(found: parity.Trace, right: parity.Trace) -> list[str]:
    gradients = [name for name, value in right.gradients.items() if not torch.equal(found.gradients[name], value)]
    numbers = ["losses"] * (found.losses != right.losses) + ["norms"] * (found.norms != right.norms)
    return numbers + gradients + ["weights"] * (found.held != right.held)


@pytest.mark.matrix(8)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bit_by_bit_what_it_is_without(ranks: RankPool, case: Case) -> None:
    """Losses, norms, first gradients, and all that each rank holds after each step."""
    plans = [case.plan, without(case.plan)]
    for found, right in ranks.run(drawn.train_on_rank, case.spec, plans, STEPS, world=case.plan.layout.world):
        assert differ(found, right) == []


@pytest.mark.matrix(6)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_held_and_copied(case: Case) -> None:
    """To the byte on both tiers, on the first rank and the last."""
    for rank in sorted({0, case.plan.layout.world - 1}):
        found = drift(case.spec, case.plan, rank)
        assert found.differences() == []
        assert found.measured.copied["device", "host"] == found.measured.copied["host", "device"] > 0


def compiled_steps(rank: int, world: int, case: Case) -> list[tuple[parity.Trace, int]]:
    """Traces with and without, and how many bytes each copied to the host."""
    found = []
    for plan in (case.plan, without(case.plan)):
        with compiler("aot_eager"), counted() as copied:
            trace = drawn.take_steps(rank, case.spec, replace(plan, compile=True), STEPS)
        found.append((trace, copied["device", "host"]))
    return found


@contextmanager
def counted() -> Iterator[Counter[tuple[str, str]]]:
    """What all parts copy."""
    total: Counter[tuple[str, str]] = Counter()
    made = MovedInputs.__init__

    def begin(self: MovedInputs, blocks: Any) -> None:
        made(self, blocks)
        self.copied = total

    with patch.object(MovedInputs, "__init__", begin):
        yield total


@pytest.mark.matrix(2)
@pytest.mark.parametrize("layout", ["one rank", "zero3"])
def test_compiled_blocks(ranks: RankPool, layout: str) -> None:
    case = next(case for case in CASES if case.layout == layout and case.model == "tied")
    for (found, copied), (right, nothing) in ranks.run(compiled_steps, case, world=case.plan.layout.world):
        assert differ(found, right) == [] and copied > nothing == 0


def of_the_block_before() -> AbstractContextManager[Any]:
    """What is brought back ahead is taken for what is asked for."""
    unpack = MovedInputs._unpack

    def taken(self: MovedInputs, saved: Any) -> Tensor:
        if not isinstance(saved, Tensor) and saved.input.room is not None and saved.input.before is not None:
            saved = saved._replace(input=saved.input.before)
        return unpack(self, saved)

    return patch.object(MovedInputs, "_unpack", taken)


@contextmanager
def one_room_for_all() -> Iterator[None]:
    """A room is given away before its input has come back."""
    leave = MovedInputs._leave

    def given(self: MovedInputs, kept: Any, x: Tensor) -> None:
        leave(self, kept, x)
        if not self._free[x.nbytes]:
            self._free[x.nbytes].append(kept.room)

    with patch.object(MovedInputs, "_leave", given):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "the input of another block": of_the_block_before,
    "a room that is used again too early": one_room_for_all,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name: str) -> None:
    """What the proof above compares is not equal."""
    case = next(case for case in CASES if case.layout == "one rank" and case.every == 1 and case.model == "tied")
    right = drawn.take_steps(0, case.spec, without(case.plan), STEPS)
    with FAULTS[name]():
        found = drawn.take_steps(0, case.spec, case.plan, STEPS)
    assert differ(found, right)


def test_a_block_that_changes_its_input_is_refused() -> None:
    """Backward would be given what it was before."""

    class Changes(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.add_(1.0))

    blocks = [Changes(4, 4) for _ in range(2)]
    MovedInputs(blocks)
    for block in blocks:  # the input of the last one stays
        with pytest.raises(RuntimeError, match="changed its input in place"):
            block(torch.randn(2, 4))


def test_nothing_waits_where_no_backward_follows() -> None:
    blocks = [torch.nn.Linear(4, 4) for _ in range(3)]
    moved = MovedInputs(blocks)
    with torch.no_grad():
        torch.nn.Sequential(*blocks)(torch.randn(2, 4))
    assert not moved.rooms and not moved.copied
    assert Offload() == Offload("none", "none")
