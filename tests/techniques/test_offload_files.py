"""Tensors that wait in a scratch file: a room is used again when what went through it is done, and a write that failed
is told where what it wrote is read."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Timer

import pytest
import torch
from torch import nn

from shardwise.errors import OutputError
from shardwise.techniques.offload.activations import FiledTensors
from shardwise.techniques.offload.scratch import Scratch
from shardwise.techniques.offload.sizes import PAGE_BYTES, ROOMS


def test_a_room_is_used_again_once_what_was_in_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, may_write, written = Scratch.write, Event(), list[int]()

    def slow(self: Scratch, place: int, begin: int, values: memoryview) -> None:
        assert may_write.wait(20)
        write(self, place, begin, values)
        written.append(place)

    monkeypatch.setattr(Scratch, "write", slow)
    filed, owners = FiledTensors(tmp_path, PAGE_BYTES, 8, pinned=False), [nn.Identity() for _ in range(ROOMS + 1)]
    for owner in owners[:ROOMS]:
        filed.write(filed.place(owner), filed.room(), None)
    assert not written
    Timer(0.2, may_write.set).start()
    filed.room()
    assert written, "it waited for the first, which took this room"


def test_a_write_that_failed_is_told_by_its_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    filed, owner = FiledTensors(tmp_path, PAGE_BYTES, 8, pinned=False), nn.Identity()
    place = filed.place(owner)
    with monkeypatch.context() as patched:
        patched.setattr("shardwise.techniques.offload.scratch._transfer", full)
        done = filed.write(place, filed.room(), None)
        with pytest.raises(OutputError):
            done.result(20)
    read = filed.read(place, done, torch.empty(PAGE_BYTES, dtype=torch.uint8), None)
    with pytest.raises(OutputError) as raised:
        read.result(20)
    assert raised.value.problems[0].code == "OUT003"
