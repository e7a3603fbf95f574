"""Weights of blocks in a file, which come into memory of the host one block after another, past the page cache."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from shardwise.distributed.pinned import beside
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
