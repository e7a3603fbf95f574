"""Inputs of blocks that wait on the host, or in a file: a run is bit by bit what it is without, whatever it is
beside."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any
from unittest.mock import patch
from weakref import ref

import pytest
import torch
from torch import Tensor

from shardwise.errors import OutputError
from shardwise.models.config import ModelSpec
from shardwise.prove import parity
from shardwise.prove.drift import drift
from shardwise.prove.pool import RankPool
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Offload, Pipeline, Plan, Remat, Shard
from shardwise.techniques.offload import activations
from shardwise.techniques.offload.activations import FiledTensors, MovedInputs
from shardwise.techniques.offload.scratch import Scratch
from shardwise.techniques.offload.sizes import PAGE_BYTES, ROOMS
from tests.drift.compiled import compiler
from tests.parity import drawn
from tests.parity.offloading import LAYOUTS
from tests.parity.waiting import CASES, Case
from tests.said import shows

STEPS = 2


def without(plan: Plan) -> Plan:
    return replace(plan, offload=replace(plan.offload, activations="none"))


def test_every_layout_is_met() -> None:
    assert {case.layout for case in CASES} == LAYOUTS.keys() and len(CASES) <= 30


def differ(found: parity.Trace, right: parity.Trace) -> list[str]:
    gradients = [name for name, value in right.gradients.items() if not torch.equal(found.gradients[name], value)]
    numbers = ["losses"] * (found.losses != right.losses) + ["norms"] * (found.norms != right.norms)
    return numbers + gradients + ["weights"] * (found.held != right.held)


def same_to_the_bit(ranks: RankPool, spec: ModelSpec, plan: Plan, other: Plan) -> None:
    """Losses, norms, first gradients, and all that each rank holds after each step."""
    for found, right in ranks.run(drawn.train_on_rank, spec, [plan, other], STEPS, world=plan.layout.world):
        assert differ(found, right) == []


def as_planned(spec: ModelSpec, plan: Plan) -> list[Counter[tuple[str, str]]]:
    """What the first rank and the last copy, and hold, is what the plan says, to the byte on each tier."""
    found = [drift(spec, plan, rank) for rank in sorted({0, plan.layout.world - 1})]
    assert [each.differences() for each in found] == [[] for _ in found]
    return [Counter(each.measured.copied) for each in found]


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bit_by_bit_what_it_is_without(ranks: RankPool, case: Case) -> None:
    same_to_the_bit(ranks, case.spec, case.plan, without(case.plan))


@pytest.mark.matrix(12)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_held_and_copied(case: Case) -> None:
    for copied in as_planned(case.spec, case.plan):
        assert copied["device", "host"] == copied["host", "device"] > 0
        assert copied["host", "disk"] == copied["disk", "host"]
        assert bool(copied["host", "disk"]) is (case.tier == "nvme")


SCHEDULES = {
    "gpipe": Pipeline("gpipe", 1, (3, 3)),
    "interleaved": Pipeline("interleaved", 2, (3, 2, 3, 3)),
    "interleaved_zb": Pipeline("interleaved_zb", 1, (3, 3)),
    "zbv": Pipeline("zbv", 2, (3, 3, 3, 3)),
    "dualpipev": Pipeline("dualpipev", 2, (3, 3, 3, 3)),
}


@pytest.mark.matrix
@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(ranks: RankPool, schedule: str, tier: str) -> None:
    """Several forwards are in flight, of several stages, and a backward may come in two halves."""
    case = next(case for case in CASES if case.layout == "pp" and case.precision == "fp32")
    pipeline = SCHEDULES[schedule]
    layout = Layout(pp=2, v_shaped=schedule in ("zbv", "dualpipev"))
    batch, spec = replace(case.plan.batch, accumulation=4), replace(case.spec, num_hidden_layers=sum(pipeline.split))
    plan = replace(case.plan, layout=layout, batch=batch, pipeline=pipeline, shard=Shard())
    plan = replace(plan, remat=Remat("full"), offload=Offload("none", tier))  # type: ignore[arg-type]
    same_to_the_bit(ranks, spec, plan, without(plan))
    for copied in as_planned(spec, plan):
        assert copied["device", "host"] == copied["host", "device"] > 0


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

    def begin(self: MovedInputs, *given: Any, **named: Any) -> None:
        made(self, *given, **named)
        self.copied = total

    with patch.object(MovedInputs, "__init__", begin):
        yield total


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["one rank", "zero3"])
def test_compiled_blocks(ranks: RankPool, layout: str) -> None:
    case = next(case for case in CASES if case.layout == layout and case.model == "tied")
    for (found, copied), (right, nothing) in ranks.run(compiled_steps, case, world=case.plan.layout.world):
        assert differ(found, right) == [] and copied > nothing == 0


def of_the_block_before() -> AbstractContextManager[Any]:
    """What is brought back ahead is taken for what is asked for."""
    unpack = MovedInputs._unpack

    def taken(self: MovedInputs, saved: Any) -> Tensor:
        if not isinstance(saved, Tensor) and saved[0].room is not None and saved[0].before is not None:
            saved = (saved[0].before, *saved[1:])
        return unpack(self, saved)

    return patch.object(MovedInputs, "_unpack", taken)


@contextmanager
def one_room_for_all() -> Iterator[None]:
    """A room is given away before its input has come back."""
    leave = MovedInputs._leave

    def given(self: MovedInputs, kept: Any, x: Tensor, later: int) -> None:
        leave(self, kept, x, later)
        if not self._free[x.nbytes]:
            self._free[x.nbytes].append(kept.room)

    with patch.object(MovedInputs, "_leave", given):
        yield


def of_another_place() -> AbstractContextManager[Any]:
    """A file is read a place too early."""
    read = Scratch.read
    return patch.object(Scratch, "read", lambda self, place, *rest: read(self, max(0, place - 1), *rest))


@contextmanager
def slow_writes() -> Iterator[None]:
    """No fault: what is written takes longer than what is computed meanwhile."""
    write = activations._write

    def late(*given: Any) -> None:
        sleep(0.05)
        write(*given)

    with patch.object(activations, "_write", late):
        yield


@contextmanager
def held_back(*, overtaken: bool = False) -> Iterator[None]:
    """What is to be written waits in its room until something is read: it is written before that, or after it."""
    write, read, waiting = activations._write, activations._read, list[Any]()

    def write_all() -> None:
        while waiting:
            write(*waiting.pop(0))

    def reads(*given: Any) -> Any:
        if not overtaken:
            write_all()
        found = read(*given)
        write_all()
        return found

    with (
        patch.object(activations, "_write", lambda *given: waiting.append(given)),
        patch.object(activations, "_read", reads),
    ):
        yield


@contextmanager
def one_room_at_once() -> Iterator[None]:
    """The room is given to the next input while the last one is still to be written."""
    with held_back(), patch.object(FiledTensors, "room", lambda self: self.rooms[0]):
        yield


def read_at_once() -> AbstractContextManager[None]:
    """A read does not wait for the write before it."""
    return held_back(overtaken=True)


Fault = Callable[[], AbstractContextManager[Any]]
FAULTS: dict[str, tuple[str, bool, Fault]] = {
    "the input of another block": ("host", True, of_the_block_before),
    "a room that is used again too early": ("host", True, one_room_for_all),
    "the place of another block": ("nvme", True, of_another_place),
    "a room that is used again before it is written": ("nvme", True, one_room_at_once),
    "a read that overtakes its write": ("nvme", True, read_at_once),
    "slow writes, which are no fault": ("nvme", False, slow_writes),
    "writes that wait for a read, which are no fault": ("nvme", False, held_back),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name: str) -> None:
    """What the proof above compares is not equal."""
    tier, seen, fault = FAULTS[name]
    case = next(case for case in CASES if case.layout == "one rank" and case.every == 1 and case.model == "tied")
    right = drawn.take_steps(0, case.spec, without(case.plan), STEPS)
    with fault():
        found = drawn.take_steps(0, case.spec, replace(case, tier=tier).plan, STEPS)
    assert bool(differ(found, right)) is seen


def test_a_block_that_changes_its_input_is_refused() -> None:
    """Backward would be given what it was before."""

    class Changes(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.add_(1.0))

    blocks = [Changes(4, 4) for _ in range(2)]
    MovedInputs(blocks)
    for block in blocks:  # the input of the last one stays
        with pytest.raises(RuntimeError, match="input in place"):
            block(torch.randn(2, 4))


class Parts(torch.nn.Linear):
    """Saves its input, a part of it, and another tensor of its shape for backward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh() + x[1:].square().sum()


GIVEN = {
    "whole": [torch.randn(2, 4), torch.randn(3, 4), torch.randn(2, 4)],
    "not contiguous": [torch.randn(4, 3).mT],
    "part of a larger one": [torch.randn(5, 4)[2:]],
}


@pytest.mark.parametrize("filed", [False, True])
@pytest.mark.parametrize("name", GIVEN)
def test_what_is_saved_of_an_input_comes_back(name: str, filed: bool, tmp_path: Path) -> None:
    blocks, moved = [Parts(4, 4) for _ in range(4)], None
    rows: list[list[Tensor]] = [[], []]
    for found in rows:
        for given in GIVEN[name]:
            torch.nn.Sequential(*blocks)(given).sum().backward()
            found += [
                parameter.grad for block in blocks for parameter in block.parameters() if parameter.grad is not None
            ]
            for block in blocks:
                block.zero_grad()
        moved = moved or MovedInputs(blocks, tmp_path if filed else None)
    assert all(map(torch.equal, *rows)) and len(rows[0]) == 8 * len(GIVEN[name])
    sizes = 2 if name == "whole" else 1
    assert moved and len(moved.rooms) == sizes * (ROOMS if filed else 3 if name == "whole" else 2)
    places = [len(file.begins) - 1 for file in moved.files]
    assert places == filed * ([3, 3] if name == "whole" else [2]), "of each size; what is not whole stays"


@pytest.mark.parametrize("filed", [False, True])
def test_an_input_comes_one_block_ahead_and_goes_again(filed: bool, tmp_path: Path) -> None:
    """Each backward of a graph that is kept asks for all but the last: none of them stays on the device."""
    blocks = [torch.nn.Linear(4, 4) for _ in range(4)]
    moved, size, come = MovedInputs(blocks, tmp_path if filed else None), 2 * 4 * 4, list[int]()
    for block in blocks:
        block.weight.register_hook(lambda _: come.append(moved.copied["host", "device"] // size))
    out = torch.nn.Sequential(*blocks)(torch.randn(2, 4)).sum()
    written = {("host", "disk"): 3 * PAGE_BYTES} if filed else {}
    assert moved.copied == {("device", "host"): 3 * size, **written}
    out.backward(retain_graph=True)
    assert come == [1, 2, 3, 3]
    out.backward()
    assert come[4:] == [4, 5, 6, 6]


def test_a_pass_holds_nothing_of_the_one_before_it() -> None:
    """Neither one that is gone with its graph nor one whose backward is over."""
    blocks, gone = [torch.nn.Linear(4, 4) for _ in range(3)], []
    moved, model = MovedInputs(blocks), torch.nn.Sequential(*blocks)
    blocks[-1].register_forward_pre_hook(lambda _, given: gone.append(ref(given[0])))
    first, second = model(torch.randn(2, 4)), model(torch.randn(2, 4))
    assert len(moved.rooms) == 4
    del first
    model(torch.randn(2, 4))
    assert len(moved.rooms) == 4 and gone[0]() is None
    second.sum().backward()
    assert gone[1]() is None and gone[2]() is None


def test_many_inputs_pass_through_few_rooms(tmp_path: Path) -> None:
    """Whatever the disk takes. Two passes in flight are in two files, which those after them use again."""
    blocks: list[torch.nn.Module] = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(12)]
    model, rows = torch.nn.Sequential(*blocks), [torch.randn(2, 4, requires_grad=True) for _ in range(4)]
    right = [torch.autograd.grad(model(row).sum(), row)[0] for row in rows]
    moved = MovedInputs(blocks, tmp_path)
    for pair in ((0, 1), (2, 3)):
        outs = [model(rows[number]).sum() for number in pair]
        for number, out in zip(pair, outs, strict=True):
            assert torch.equal(torch.autograd.grad(out, rows[number])[0], right[number])
        del outs, out
    assert len(moved.rooms) == ROOMS and [len(file.begins) for file in moved.files] == [12, 12]
    assert [*tmp_path.iterdir()] == [], "they have no names"


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_an_error_of_the_disk_is_told(call: str, tmp_path: Path) -> None:
    """Where what was to be written, or read, is needed."""
    blocks = [torch.nn.Linear(4, 4) for _ in range(3)]
    MovedInputs(blocks, tmp_path)
    model = torch.nn.Sequential(*blocks)
    model(torch.randn(2, 4)).sum().backward()
    failure = OSError(errno.EIO, "worn out")
    with patch.object(os, call, side_effect=failure), pytest.raises(OutputError) as raised:
        model(torch.randn(2, 4)).sum().backward()
    [problem] = raised.value.problems
    assert (problem.code, problem.where) == ("OUT002", "offload.directory")
    assert shows(problem.what, "inputs of blocks", tmp_path, "worn out")


def test_nothing_waits_where_no_backward_follows() -> None:
    blocks = [torch.nn.Linear(4, 4) for _ in range(3)]
    moved = MovedInputs(blocks)
    with torch.no_grad():
        torch.nn.Sequential(*blocks)(torch.randn(2, 4))
    assert not moved.rooms and not moved.copied
    blocks = [torch.nn.Linear(4, 4) for _ in range(3)]
    blocks[0].requires_grad_(False)  # before anything that is trained
    moved = MovedInputs(blocks)
    torch.nn.Sequential(*blocks)(torch.randn(2, 4)).sum().backward()
    assert moved.copied == {("device", "host"): 2 * 4 * 4, ("host", "device"): 2 * 4 * 4}
    assert Offload() == Offload("none", "none")
