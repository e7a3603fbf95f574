"""Weights of blocks, which wait in memory of the host while other blocks compute: frozen ones, and trained ones where
the optimizer updates them there; or in a file, from which they come through memory of the host, one block after
another, past the page cache.

A weight keeps its tensor and loses its memory, as FSDP2's do: what autograd saved of it is filled again before backward
reads it. Those of a block come while the block before it computes, in forward and in backward, and go when their block
is done. Those of the last block stay from forward to backward, which begins with it, unless it is a stage's, which has
several micro-batches in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from shardwise.distributed.pinned import beside, host_buffer
from shardwise.distributed.slices import keep_on_host, local
from shardwise.distributed.torch_private import gather_stream, keep_sharded_memory, placed_as
from shardwise.techniques.offload.scratch import Scratch, aligned
from shardwise.techniques.offload.sizes import STAGED_BLOCKS


class StagedBlocks:
    """The weights of blocks, of so many bytes (``sizes``), each at a place of a file in ``directory`` (``scratch``). A
    thread reads blocks in the order in which they are asked for, into one of two rooms and the other by turns; of a
    GPU's host, pinned ones. Raises OutputError as Scratch does."""

    def __init__(self, directory: Path, sizes: Sequence[Sequence[int]], *, pinned: bool) -> None:
        self.sizes = sizes
        self.scratch = Scratch(directory, [size for block in sizes for size in block], "the weights file")
        self.firsts = [*accumulate(map(len, sizes), initial=0)]  # places of blocks, and behind the last
        self.pages = [self.scratch.begins[end] - self.scratch.begins[first] for first, end in pairwise(self.firsts)]
        views = [aligned(max(self.pages, default=0), pinned=pinned) for _ in range(STAGED_BLOCKS)]
        self.views, self.rooms = [view for view, _ in views], [room for _, room in views]
        self.copied: list[torch.cuda.Event | None] = [None] * STAGED_BLOCKS
        self._coming: dict[int, tuple[int, Future[None]]] = {}
        self._turn = 0
        self._thread = beside(pinned=pinned)

    def read(self, number: int) -> bool:
        """Have a block read, unless it is in a room or on its way there already; return whether it is read now."""
        if number in self._coming:
            return False
        self._turn = (self._turn + 1) % STAGED_BLOCKS
        self._coming = {other: coming for other, coming in self._coming.items() if coming[0] != self._turn}
        done = self._thread.submit(self._fill, number, self._turn, self.copied[self._turn])
        self._coming[number] = self._turn, done
        return True

    def _fill(self, number: int, room: int, copied: torch.cuda.Event | None) -> None:
        """Read a block into a room, when what was there has been copied out of it."""
        if copied is not None:
            copied.synchronize()
        self.scratch.read(self.firsts[number], 0, self.views[room][: self.pages[number]])

    def take(self, number: int) -> tuple[int, list[Tensor]]:
        """Return the room that has a block, which has been asked for, and there its weights as bytes; wait until it has
        been read. Until when it is copied, ``copied`` is to say of the room. Raises OutputError where it could not be
        read."""
        room, done = self._coming.pop(number)
        done.result()
        begins, first = self.scratch.begins, self.firsts[number]
        flat = (self.rooms[room][begin - begins[first] :] for begin in begins[first:])
        return room, [values[:size] for values, size in zip(flat, self.sizes[number], strict=False)]

    def forget(self) -> None:
        """Forget what was read and not taken: the file may be written before it is asked for again."""
        self._coming.clear()


Fetched = tuple[Tensor, int, Tensor]
"""A weight of this rank: its tensor on the device, how many bytes that has when it is there, and its values."""


class WaitingWeights:
    """The waiting weights of one part's blocks, each of which is added once it has memory on the device, in their
    order: those that are ``trained`` too, or frozen ones alone. If the last block ``stays``, it is there from forward
    to backward; it does not where other micro-batches come between. With a ``file`` they wait there, each at its
    ``places``. ``copied`` counts bytes by (from, to); ``rooms`` is all memory of the host."""

    def __init__(self, *, trained: bool, stays: bool = True, file: StagedBlocks | None = None) -> None:
        self.trained = trained
        self.stays = stays
        self.file = file
        self.places: dict[Tensor, tuple[Scratch, int]] = {}
        self.copied: Counter[tuple[str, str]] = Counter()
        self.rooms: list[Tensor] = file.rooms if file else []
        self._blocks: list[list[Fetched]] = []
        self._here: dict[int, torch.cuda.Event | None] = {}
        self._late: set[int] = set()  # of those that are here, what is still to be copied from a file
        self._backward: set[int] = set()  # blocks of whose last output a gradient is asked for
        self._stream: torch.cuda.Stream | None = None
        self._gathers: nn.Module | None = None

    def add(self, block: nn.Module) -> None:
        """Give the block's weights memory on the host, to be filled with ``slices.put``; from here on they have none on
        the device but while it computes."""
        keep_sharded_memory(block)
        self._blocks.append([])
        for parameter in block.parameters():
            if self.trained or not parameter.requires_grad:
                tensor = local(parameter.detach())
                if self.file:
                    self.places[parameter] = self.file.scratch, len(self.places)
                    room = self.file.scratch.mapped(len(self.places) - 1, tensor)
                else:
                    room = host_buffer(tensor.nbytes, pinned=tensor.is_cuda).view(tensor.dtype).view(tensor.shape)
                    self.rooms.append(room)
                keep_on_host(parameter, placed_as(parameter, room))
                self._blocks[-1].append((tensor, tensor.untyped_storage().nbytes(), room))
                tensor.untyped_storage().resize_(0)
        number = len(self._blocks) - 1
        # Before FSDP2's own hooks: it gathers a block before that computes.
        block.register_forward_pre_hook(partial(self._begins, number), prepend=True)
        block.register_forward_hook(partial(self._ends, number), prepend=True)

    def rest(self) -> None:
        """Let go of what is still on the device when a backward is over."""
        for number in [*self._here]:
            self._go(number)
        if self.file:
            self.file.forget()

    def _begins(self, number: int, block: nn.Module, given: object) -> None:
        """Have the weights of a block there as its forward begins, and those of the next one come."""
        self._gathers = block
        self._come(number)
        self._await(number)
        self._come(number + 1)

    def _ends(self, number: int, block: nn.Module, given: object, out: Any) -> None:
        outputs = [each for each in (out if isinstance(out, tuple) else (out,)) if isinstance(each, Tensor)]
        differentiated = [each for each in outputs if each.requires_grad]
        if differentiated:
            register_multi_grad_hook(differentiated, lambda gradient: self._begins_backward(number), mode="any")
            self._backward.add(number)
        else:
            self._backward.discard(number)
        if not (differentiated and self.stays) or number < len(self._blocks) - 1:
            self._go(number)
        elif number - 1 in self._backward:
            self._read(number - 1)

    def _begins_backward(self, number: int) -> None:
        self._go(number + 1)
        self._come(number)
        self._await(number)
        if number - 1 in self._backward:
            self._come(number - 1)
            self._await(number - 1, computes=False)  # FSDP2 gathers it while this block computes
            if number - 1 not in self._late and number - 2 in self._backward:
                self._read(number - 2)

    def _read(self, number: int) -> None:
        """Have a block read from the file, if there is one."""
        if self.file and self.file.read(number):
            self.copied["disk", "host"] += sum(self.file.sizes[number])

    def _come(self, number: int) -> None:
        """Give the weights of a block memory, and copy them into it, once what was given to the device before is done,
        beside what is computed; on a CPU at once. From a file they are read, and copied when they are waited for."""
        if number in self._here or number >= len(self._blocks):
            return
        for tensor, size, _ in self._blocks[number]:
            tensor.untyped_storage().resize_(size)
        cuda = next((tensor.device for tensor, *_ in self._blocks[number] if tensor.is_cuda), None)
        self._here[number] = None
        if cuda is not None:
            self._stream = self._stream or torch.cuda.Stream(cuda)
            self._stream.wait_stream(torch.cuda.current_stream(cuda))
        if self.file:
            self._late.add(number)
            self._read(number)
        else:
            self._bring(number)

    def _bring(self, number: int) -> None:
        """Copy a block, from a file once it has been read, and keep what tells when that is done."""
        self._late.discard(number)
        if self._stream is None:
            self._copy(number)
            return
        with torch.cuda.stream(self._stream):
            taken = self._copy(number)
            self._here[number] = self._stream.record_event()
        if self.file:
            self.file.copied[taken] = self._here[number]

    def _copy(self, number: int) -> int:
        """Copy the weights of a block to the device; return the number of the room that they had, if they come from a
        file."""
        values, taken = [room for *_, room in self._blocks[number]], 0
        if self.file:
            taken, values = self.file.take(number)
        for (tensor, *_), room in zip(self._blocks[number], values, strict=True):
            own = room.view(tensor.dtype).view(tensor.shape)
            tensor.data.copy_(own, non_blocking=True)  # autograd does not take it for a change of what it saved
            self.copied["host", "device"] += room.nbytes
        return taken

    def _await(self, number: int, *, computes: bool = True) -> None:
        """Have what is given to the device from here on, or at least what FSDP2 gathers, begin when a block is
        there."""
        assert self._gathers is not None
        stream = gather_stream(self._gathers)
        if number in self._late and (computes or stream is not None):
            self._bring(number)
        if (done := self._here[number]) is not None:
            if computes:
                torch.cuda.current_stream().wait_event(done)
            if stream is not None:
                stream.wait_event(done)

    def _go(self, number: int) -> None:
        """Let go of a block that is done, if it is here: its memory may be used for what is computed next."""
        self._late.discard(number)
        if number in self._here:
            if (done := self._here.pop(number)) is not None:
                torch.cuda.current_stream().wait_event(done)
            for tensor, *_ in self._blocks[number]:
                tensor.untyped_storage().resize_(0)
