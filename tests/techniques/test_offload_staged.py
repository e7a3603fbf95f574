"""Weights of blocks in a file: rooms are used by turns, none before it has been copied out of; errors, full disks."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from shardwise.distributed.slices import kept, put
from shardwise.errors import OutputError
from shardwise.techniques.offload.host_copies import HostWeights
from shardwise.techniques.offload.scratch import Scratch
from shardwise.techniques.offload.sizes import BLOCK_BYTES, PAGE_BYTES
from shardwise.techniques.offload.weights import StagedBlocks, WaitingWeights

SIZES = [[5, 2 * PAGE_BYTES], [PAGE_BYTES, 7], [], [1, 1]]
"""Three pages, two, none, two."""


def filled(directory: Path) -> StagedBlocks:
    """Each byte of a weight is the number of the weight."""
    file = StagedBlocks(directory, SIZES, pinned=False)
    for place, size in enumerate(size for block in SIZES for size in block):
        file.scratch.mapped(place, torch.empty(size, dtype=torch.uint8)).fill_(1 + place)
    file.scratch.settle()
    return file


def test_blocks_come_into_two_rooms_by_turns(tmp_path: Path) -> None:
    file = filled(tmp_path)
    assert [room.nbytes for room in file.rooms] == [3 * PAGE_BYTES] * 2
    seen = []
    for number, following in ((0, 1), (1, 2), (2, 3), (3, 0), (0, 3)):
        assert file.read(number) is (number == 0 and not seen) and file.read(following)
        room, values = file.take(number)
        assert [value.nbytes for value in values] == SIZES[number]
        first = 1 + sum(map(len, SIZES[:number]))
        assert all((value == first + i).all() for i, value in enumerate(values))
        seen.append(room)
    assert len({*seen[::2]}) == len({*seen[1::2]}) == 1 and {*seen} == {0, 1}


def test_a_room_is_filled_when_what_it_had_has_been_copied(tmp_path: Path) -> None:
    """That of the block before stays as it is until its event says so."""
    file, done = filled(tmp_path), list[str]()

    class Event:
        def synchronize(self) -> None:
            done.append(f"waited with {int(values[0][0])}")

    file.read(0)
    room, values = file.take(0)
    file.copied[room] = Event()  # type: ignore[call-overload]
    file.read(1)
    file.take(1)
    assert not done
    file.read(3)
    assert file.take(3)[0] == room and done == ["waited with 1"]


def test_what_was_read_ahead_is_not_taken_once_it_may_have_changed(tmp_path: Path) -> None:
    file = filled(tmp_path)
    file.read(1)
    file.forget()
    file.scratch.mapped(2, torch.empty(PAGE_BYTES, dtype=torch.uint8)).fill_(9)
    assert file.read(1) and (file.take(1)[1][0] == 9).all()


def test_an_error_of_the_thread_ends_the_forward(tmp_path: Path) -> None:
    block = nn.Linear(4, 4)
    waits = WaitingWeights(trained=True, file=StagedBlocks(tmp_path, [[64, 16]], pinned=False))
    waits.add(block)
    with (
        patch.object(Scratch, "read", side_effect=OSError(errno.EIO, "worn out")),
        pytest.raises(OSError, match="worn"),
    ):
        block(torch.zeros(2, 4))


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, "OUT003"), (errno.EROFS, "OUT002")])
def test_a_disk_that_has_no_room_is_told_before_a_step(tmp_path: Path, number: int, code: str) -> None:
    refuse = OSError(number, os.strerror(number))
    with patch.object(os, "posix_fallocate", side_effect=refuse), pytest.raises(OutputError) as raised:
        StagedBlocks(tmp_path, [[2**30]], pinned=False)
    [problem] = raised.value.problems
    assert problem.code == code and "the weights file" in problem.what and problem.where == "offload.directory"
    assert [*tmp_path.iterdir()] == []


def test_an_update_is_written_where_the_next_forward_reads(tmp_path: Path) -> None:
    """Once, past the memory in which it is mapped; of what does not wait, on the device. The other file has moments."""
    numbers = BLOCK_BYTES // 4 + 5
    part = nn.ModuleList([nn.Linear(numbers, 1, bias=False), nn.Linear(3, 1, bias=False)])
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.fill_(1.0)
    waits = WaitingWeights(trained=True, file=StagedBlocks(tmp_path, [[4 * numbers]], pinned=False))
    waits.add(part[0])
    put(part[0].weight, torch.ones(1, numbers))
    host = HostWeights(part.parameters(), early=False, cut=False, directory=tmp_path, places=waits.places)
    assert (
        host.scratch
        and host.scratch.begins[1] == 0
        and host.of(part[0].weight).data_ptr() == kept(part[0].weight).data_ptr()
    )
    groups = [{"params": [host.of(parameter) for parameter in part.parameters()], "weight_decay": 0.0}]
    optimizer = host.streamed(groups, {"lr": 0.5, "betas": (0.9, 0.95), "eps": 1e-8})
    for parameter in part.parameters():
        parameter.grad = torch.ones_like(parameter)
    host.take_rest()
    optimizer.step()
    for block in part:
        assert block(torch.ones(1, block.in_features)).item() == pytest.approx(block.in_features * 0.5)
    assert host.copied["host", "device"] == 12 and waits.copied["disk", "host"] == 4 * numbers
