"""Tensors of one size that wait in a scratch file: each leaves and comes back through a room on the host."""

from __future__ import annotations

import weakref
from pathlib import Path

import torch
from torch import Tensor

from shardwise.techniques.offload.rooms import Done, Rooms
from shardwise.techniques.offload.scratch import Scratch, aligned
from shardwise.techniques.offload.sizes import ROOMS

Place = tuple[Scratch, int]
Room = tuple[memoryview, Tensor]
"""Whole pages, as bytes and as a flat tensor of these."""


class FiledTensors(Rooms[Room]):
    """Tensors of ``size`` bytes each, in memory of the host that is ``pinned`` or not while they pass. ``files`` have
    so many ``places`` each: a second is made where the first is full. Raises OutputError like these, before anything is
    written, or where it is waited for."""

    def __init__(self, directory: Path, size: int, places: int, *, pinned: bool) -> None:
        super().__init__((aligned(size, pinned=pinned) for _ in range(ROOMS)), pinned=pinned)
        self.files: list[Scratch] = []
        self._directory, self._sizes = directory, [size] * places
        self._free: list[Place] = []

    def place(self, of: object) -> Place:
        """Return a place that nothing else is in, until ``of`` is gone."""
        if not self._free:
            self.files.append(Scratch(self._directory, self._sizes, "the file for inputs of blocks"))
            self._free += [(self.files[-1], place) for place in reversed(range(len(self._sizes)))]
        place = self._free.pop()
        weakref.finalize(of, self._free.append, place)
        return place

    def write(self, place: Place, room: Room, copied: torch.cuda.Event | None) -> Done:
        """Write what is in a room, once it has been ``copied`` there, to a place."""
        return self.tell(_write, place, room, copied)

    def read(self, place: Place, written: Done, here: Tensor, stream: torch.cuda.Stream | None) -> Done:
        """Bring what was ``written`` at a place to ``here``, on a stream of the device; return what tells when, once it
        is known."""
        return self.tell(_read, place, self.room(), written, here, stream)


def as_tensor(room: Room, like: Tensor, shape: torch.Size) -> Tensor:
    """Return the room as a tensor of this shape, in the dtype of ``like``."""
    return room[1][: shape.numel() * like.element_size()].view(like.dtype).view(shape)


def copied(target: Tensor, source: Tensor, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """Copy on a stream of a device, and return what tells when that is done; on a CPU at once."""
    with torch.no_grad():
        if stream is None:
            target.copy_(source)
            return None
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()


def _write(place: Place, room: Room, arrived: torch.cuda.Event | None) -> None:
    if arrived is not None:
        arrived.synchronize()
    place[0].write(place[1], 0, room[0])


def _read(
    place: Place, room: Room, written: Done, here: Tensor, stream: torch.cuda.Stream | None
) -> torch.cuda.Event | None:
    written.result()  # or its error
    place[0].read(place[1], 0, room[0])
    return copied(here, as_tensor(room, here, here.shape), stream)
