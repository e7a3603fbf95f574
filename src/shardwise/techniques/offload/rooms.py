"""Rooms on the host through which tensors pass, to a sum of gradients there, or to a file and back.

They are few and taken by turns: whoever asks for one waits until what went through it last is done. One thread does
what it is told, in that order: no read overtakes the write before it, and gradients add up as they would on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch

from shardwise.distributed.pinned import beside

Room = TypeVar("Room")
Done = Future["torch.cuda.Event | None"]


class Rooms(Generic[Room]):
    """The ``rooms``, in memory of the host that is ``pinned`` or not, and their thread."""

    def __init__(self, rooms: Iterable[Room], *, pinned: bool) -> None:
        self.rooms = [*rooms]
        self._used: deque[Done] = deque()
        self._thread = beside(pinned=pinned)

    def room(self) -> Room:
        """Return the next room, once what went through it last is where it was to go."""
        if len(self._used) == len(self.rooms) and (done := self._used.popleft().result()) is not None:
            done.synchronize()
        self.rooms.append(self.rooms.pop(0))
        return self.rooms[-1]

    def tell(self, task: Callable[..., torch.cuda.Event | None], *given: Any) -> Done:
        """Have the thread do something with the room that was given last; return what tells when that is done."""
        self._used.append(self._thread.submit(task, *given))
        return self._used[-1]

    def settle(self) -> None:
        """Wait until all is done."""
        for done in self._used:
            done.result()
