"""Weights that the host has updated, on their way back to the device.

Embedding and output layer are waited for. A block's weights come while the blocks before it compute, in the next
forward. What the device has in another dtype is cast on the host, to the room of its gradient, which nothing else needs
until the block's backward; a thread casts a block while the one before it is copied. On a CPU all come at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor, nn

from shardwise.distributed.pinned import beside
from shardwise.distributed.slices import local
from shardwise.distributed.torch_private import gather_stream

Return = tuple[nn.Parameter, Tensor, Tensor]
"""A weight of the device, its copy on the host, and room there for as many bytes as that has."""


class ReturningWeights:
    """The weights that return (``returns``): those of blocks, once they are told of (:meth:`come_beside`), are waited
    for when their block runs, all others when they are given."""

    def __init__(self, returns: Sequence[Return]) -> None:
        self._groups = [[*returns]]  # what is waited for, and blocks in their order
        self._coming: dict[int, Future[torch.cuda.Event]] = {}
        self._given: list[Future[torch.cuda.Event]] = []
        self._stream: torch.cuda.Stream | None = None
        if cuda := next((weight.device for weight, *_ in returns if weight.is_cuda), None):
            self._stream, self._thread = torch.cuda.Stream(cuda), beside(pinned=True)

    def come_beside(self, blocks: Sequence[nn.Module]) -> None:
        """Have the weights of these blocks, in their order, waited for when their block runs, from here on."""
        [rest] = self._groups
        for number, block in enumerate(blocks, 1):
            own = {*block.parameters()}
            self._groups.append([one for one in rest if one[0] in own])
            rest = [one for one in rest if one[0] not in own]
            block.register_forward_pre_hook(partial(self._begins, number), prepend=True)  # FSDP2 gathers in its own
        self._groups[0] = rest

    def give(self) -> int:
        """Give the device what the copies have now, and return how many bytes that is."""
        if self._stream is None:
            for group in self._groups:
                _send(group)
        else:
            begun = torch.cuda.current_stream(self._stream.device).record_event()
            self._given = [self._thread.submit(_send_on, self._stream, group, begun) for group in self._groups]
            self._coming = dict(enumerate(self._given))
            self._await(0)
        return sum(local(weight.detach()).nbytes for group in self._groups for weight, *_ in group)

    def settle(self) -> None:
        """Wait until all are there: then copies may change."""
        for given in self._given:
            given.result().synchronize()
        self._given = []

    def _begins(self, number: int, block: nn.Module, given: object) -> None:
        """Wait for the weights of a block whose forward begins."""
        self._await(number, gather_stream(block) if number in self._coming else None)

    def _await(self, number: int, gathers: torch.cuda.Stream | None = None) -> None:
        """Have what is given to the device from here on begin when a group is there, and what FSDP2 gathers too."""
        if (coming := self._coming.pop(number, None)) is not None:
            done = coming.result()
            torch.cuda.current_stream().wait_event(done)
            if gathers is not None:
                gathers.wait_event(done)


def _send(group: Sequence[Return]) -> None:
    with torch.no_grad():
        for weight, copy, room in group:
            if copy.dtype != weight.dtype:
                copy = room.view(-1).view(weight.dtype)[: copy.numel()].view(copy.shape).copy_(copy)
            local(weight.detach()).copy_(copy, non_blocking=True)


def _send_on(stream: torch.cuda.Stream, group: Sequence[Return], begun: torch.cuda.Event) -> torch.cuda.Event:
    """Send a group on this stream, once the device has done what it was given before."""
    stream.wait_event(begun)
    with torch.cuda.stream(stream):
        _send(group)
        return stream.record_event()
