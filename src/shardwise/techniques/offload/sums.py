"""Gradients of several micro-batches, which the host adds up: each comes into a buffer, and from there to the sum of
those before it, while the next one comes into another buffer."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import Tensor

from shardwise.distributed.pinned import beside, host_buffer
from shardwise.techniques.offload.sizes import SUM_BUFFERS


class HostSums:
    """The sums of gradients on the host, with ``buffers`` for gradients of up to ``size_bytes``, in memory that is
    ``pinned`` or not. A thread of its own adds, in the order in which gradients come: the sum is what the device would
    find."""

    def __init__(self, size_bytes: int, *, pinned: bool) -> None:
        self.buffers = [host_buffer(size_bytes, pinned=pinned) for _ in range(SUM_BUFFERS)]
        self._added: list[Future[None] | None] = [None] * SUM_BUFFERS
        self._thread = beside(pinned=pinned)

    def room(self, like: Tensor) -> Tensor:
        """Return room for a gradient like this one, once what came there before has been added."""
        self.buffers, self._added = ([*them[1:], them[0]] for them in (self.buffers, self._added))
        if (before := self._added[0]) is not None:
            before.result()
        return self.buffers[0][: like.nbytes].view(like.dtype).view(like.shape)

    def add(self, room: Tensor, total: Tensor, copied: torch.cuda.Event | None) -> None:
        """Add what comes into the ``room`` that was asked for last to a ``total``, once it has been ``copied``."""
        if copied is None:
            total.add_(room)
        else:
            self._added[0] = self._thread.submit(_add, room, total, copied)

    def settle(self) -> None:
        """Wait until all has been added."""
        for added in self._added:
            if added is not None:
                added.result()


def _add(room: Tensor, total: Tensor, copied: torch.cuda.Event) -> None:
    copied.synchronize()
    total.add_(room)
