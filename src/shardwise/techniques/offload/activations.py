"""The inputs of blocks that are computed again in backward, which wait for it in memory of the host, or in a file.

A block's input leaves while the block computes, and the memory is free when it has. It comes back while backward
computes the block after it. That of the last block stays: backward begins with it. Memory of the host, and places in
the file, are kept for the inputs of the next step. From the host to the file and back a thread brings them.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.distributed.pinned import host_buffer
from shardwise.models.blocks import surround
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


class _Input:
    """The input of one block in one forward pass. It is in ``room`` on the host or at its ``place`` in a file, or
    ``here`` on the device, or both; where a copy is on its way, it is ``done`` at the event, and what goes to a file
    and from there is at the end of what is ``pending`` in the thread. ``before``: that of the block before it."""

    def __init__(self, x: Tensor, before: _Input | None) -> None:
        self.like = x.new_empty(0)
        self.shape = x.shape
        self.before = before
        self.here: Tensor | None = x
        self.room: Tensor | None = None
        self.place: Place | None = None
        self.pending: Done | None = None
        self.done: torch.cuda.Event | None = None


View = tuple[_Input, torch.Size, tuple[int, ...], int]
"""A stand-in in the graph for a tensor in the memory of an input: its shape, stride and offset there."""


class MovedInputs:
    """The inputs of one part's ``blocks``, in their order, all of which are computed again. With a ``directory`` they
    wait in a file there; those of the first so many (``stays``) do not leave. ``copied`` counts bytes by (from, to);
    ``rooms`` is all memory of the host."""

    def __init__(self, blocks: Sequence[nn.Module], directory: Path | None = None, stays: int = 0) -> None:
        self.directory, self._stays = directory, stays
        self.rooms: list[Tensor] = []
        self.copied: Counter[tuple[str, str]] = Counter()
        self._filed: dict[int, FiledTensors] = {}
        self._count = len(blocks)
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._last: Callable[[], _Input | None] = lambda: None
        self._streams: dict[str, torch.cuda.Stream] = {}
        for number, block in enumerate(blocks):
            trained = any(parameter.requires_grad for parameter in block.parameters())
            surround(block, partial(partial, self._run, (number, trained)))

    def _run(self, place: tuple[int, bool], forward: Callable[..., Any], x: Tensor, *rest: Any, **named: Any) -> Any:
        """Run a block's forward. ``place``: its number, and whether it has something to train."""
        number, trained = place
        if number == 0:
            self._last = lambda: None
        if not torch.is_grad_enabled() or not (trained or x.requires_grad):
            return forward(x, *rest, **named)
        kept = _Input(x, self._last())
        self._last = weakref.ref(kept)
        version, storage = x._version, x.untyped_storage()._cdata
        later = self._count - 1 - number
        moves = later > 0 and number >= self._stays and x.is_contiguous() and x.nbytes == x.untyped_storage().nbytes()
        if moves:
            self._leave(kept, x, later)

        def pack(saved: Tensor) -> Tensor | View:
            if saved.untyped_storage()._cdata != storage:
                return saved
            return kept, saved.shape, saved.stride(), int(saved.storage_offset())

        with saved_tensors_hooks(pack, self._unpack):
            out = forward(x, *rest, **named)
        if x._version != version:  # where hooks say what is saved, autograd does not look
            raise RuntimeError("a block changed its input in place, of which backward needs what it was")
        if moves:
            if kept.done is not None:  # then its memory may be used again
                torch.cuda.current_stream(x.device).wait_event(kept.done)
            kept.here = None
        return out

    @property
    def files(self) -> list[Scratch]:
        return [file for filed in self._filed.values() for file in filed.files]

    def _leave(self, kept: _Input, x: Tensor, later: int) -> None:
        """Begin to copy an input to where it waits. ``later``: how many inputs of a forward leave from this one on,
        where it is the first that does."""
        if self.directory is not None:
            if x.nbytes not in self._filed:
                self._filed[x.nbytes] = FiledTensors(self.directory, x.nbytes, later, pinned=x.is_cuda)
                self.rooms += [values for _, values in self._filed[x.nbytes].rooms]
            filed = self._filed[x.nbytes]
            kept.place, room = filed.place(kept), filed.room()
            kept.done = self._copy("to host", as_tensor(room, x, x.shape), x)
            kept.pending = filed.write(kept.place, room, kept.done)
            self.copied["host", "disk"] += len(room[0])
            return
        free = self._free[x.nbytes]
        if not free:
            free.append(host_buffer(x.nbytes, pinned=x.is_cuda))
            self.rooms.append(free[-1])
        kept.room = free.pop()
        weakref.finalize(kept, free.append, kept.room)
        kept.done = self._copy("to host", kept.room.view(x.dtype).view(x.shape), x)

    def _unpack(self, saved: Tensor | View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        kept, shape, stride, offset = saved
        here = self._fetched(kept)
        if kept.room is not None or kept.place is not None:
            if kept.pending is not None:
                kept.done = kept.pending.result()
            if kept.done is not None:
                torch.cuda.current_stream(here.device).wait_event(kept.done)
            kept.here = None
        if kept.before is not None:
            self._fetched(kept.before)
        return here.as_strided(shape, stride, offset)

    def _fetched(self, kept: _Input) -> Tensor:
        """Return an input on the device, where it is or begins to come."""
        if kept.here is None:
            kept.here = kept.like.new_empty(kept.shape)
            if kept.place is not None:
                assert kept.pending is not None
                filed, stream = self._filed[kept.here.nbytes], self._stream("to device", kept.here)
                kept.pending = filed.read(kept.place, kept.pending, kept.here, stream)
                self.copied["disk", "host"] += len(filed.rooms[-1][0])
            else:
                assert kept.room is not None
                kept.done = self._copy("to device", kept.here, kept.room.view(kept.like.dtype).view(kept.shape))
        return kept.here

    def _copy(self, way: str, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Copy beside what is computed, once what was given to the device before is done; on a CPU at once."""
        return copied(target, source, self._stream(way, source if way == "to host" else target))

    def _stream(self, way: str, here: Tensor) -> torch.cuda.Stream | None:
        """Return the stream on which the device copies this way, behind what it was given before; None of a CPU. The
        bytes of ``here``, which are to be copied, are counted."""
        self.copied[("device", "host") if way == "to host" else ("host", "device")] += here.nbytes
        if not here.is_cuda:
            return None
        if way not in self._streams:
            self._streams[way] = torch.cuda.Stream(here.device)
        self._streams[way].wait_stream(torch.cuda.current_stream(here.device))
        return self._streams[way]
