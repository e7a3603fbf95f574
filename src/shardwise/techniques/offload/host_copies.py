"""Weights that are updated on the host: copies of what a device trains, to which its gradients come, and whose new
values it gets.

On the way back, embedding and output layer are waited for. A block's weights come while the blocks before it compute,
in the next forward. What the device has in another dtype is cast on the host, to the room of its gradient, which
nothing else needs until the block's backward; a thread casts a block while the one before it is copied. On a CPU all
come at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any
from weakref import proxy

import torch
from torch import Tensor, nn

from shardwise.distributed.pinned import beside, host_buffer
from shardwise.distributed.slices import gradient_dtype, keep_on_host, kept, local, waits
from shardwise.distributed.torch_private import gather_stream, placed_as
from shardwise.techniques.offload.rooms import Rooms
from shardwise.techniques.offload.scratch import Scratch, aligned
from shardwise.techniques.offload.sizes import BLOCK_BYTES, SUM_BUFFERS, THREADS
from shardwise.techniques.offload.streamed import STATES, StreamedAdamW

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


PLACES = 1 + len(STATES)
"""Of a parameter in a scratch file: its weight and its moments."""


class HostWeights:
    """A copy on the host of each of the ``parameters``, in the dtype in which it is updated and cut over ranks in the
    same way, and room for its gradient; of a weight that waits on the host (weights.py) its room there is the copy.
    ``early``: gradients leave as they arrive in the ``last`` micro-batch's backward, or where ``sums`` are made on the
    host, in each; if weights are ``cut``, but those of scalars, which replicas still add up. With a ``directory``
    copies are in a file there (``scratch``), with places for the moments, and the optimizer gives new values back piece
    by piece; of those that wait in a file, at these ``places``, it has the moments alone. ``copied`` counts bytes by
    (from, to)."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        early: bool,
        cut: bool,
        sums: bool = False,
        directory: Path | None = None,
        places: Mapping[Tensor, tuple[Scratch, int]] | None = None,
    ) -> None:
        self.copies: dict[nn.Parameter, nn.Parameter] = {}
        self.last = True
        self.copied: Counter[tuple[str, str]] = Counter()
        self.scratch: Scratch | None = None
        self._places = places or {}
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._rooms: list[Tensor] = []
        self._pinned: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        self._leaving: tuple[Tensor, torch.cuda.Event | None] | None = None
        weakly = proxy(self)  # or parameter, hook and parameter would hold one another
        held = {parameter: _wide(parameter) for parameter in parameters}
        self._fetched = {parameter for parameter in held if waits(parameter)}
        self._sums: Rooms[Tensor] | None = None
        if sums and held:
            pinned, largest = any(parameter.is_cuda for parameter in held), max(one.nbytes for one in held.values())
            self._sums = Rooms((host_buffer(largest, pinned=pinned) for _ in range(SUM_BUFFERS)), pinned=pinned)
        if directory is not None:
            sizes = ([0 if key in self._places else one.nbytes, one.nbytes, one.nbytes] for key, one in held.items())
            self.scratch = Scratch(directory, [size for three in sizes for size in three])
        for number, (parameter, values) in enumerate(held.items()):
            first = local(kept(parameter))
            if self.scratch and parameter not in self._places:
                copy = self.scratch.mapped(PLACES * number, values)
            else:
                copy = first if parameter in self._fetched else self._room(values, pinned=parameter.is_cuda)
            copy = copy if copy is first else copy.copy_(first)
            self.copies[parameter] = nn.Parameter(placed_as(parameter, copy))
            self._gradients[parameter] = placed_as(parameter, self._room(values, pinned=parameter.is_cuda))
            if not waits(parameter) and (not self.scratch or copy.dtype != first.dtype):
                keep_on_host(parameter, self.copies[parameter].detach())
            if parameter.is_cuda and self._stream is None:
                self._stream = torch.cuda.Stream(parameter.device)
            if early and (parameter.ndim or not cut):
                parameter.register_post_accumulate_grad_hook(lambda parameter: weakly._arrived(parameter))
        if self.scratch:
            self.scratch.settle()
        both = ((one, local(copy.detach()), local(self._gradients[one])) for one, copy in self.copies.items())
        self.returning = ReturningWeights([three for three in both if three[0] not in self._fetched])

    def streamed(self, groups: Iterable[dict[str, Any]], defaults: dict[str, Any]) -> StreamedAdamW:
        """Make the AdamW that goes through the scratch file."""
        assert self.scratch is not None
        of = {copy: parameter for parameter, copy in self.copies.items()}
        scratch, places = self.scratch, dict[nn.Parameter, list[tuple[Scratch, int]]]()
        for number, (copy, parameter) in enumerate(of.items()):
            own = [(scratch, PLACES * number + i) for i in range(PLACES)]
            places[copy] = [self._places.get(parameter, own[0]), *own[1:]]

        def give(copy: nn.Parameter, first: int, piece: Tensor) -> None:
            parameter = of[copy]
            if parameter in self._places:
                return  # it is there when it is written
            there = local(kept(parameter) if parameter in self._fetched else parameter.detach())
            with torch.no_grad():
                there.view(-1)[first : first + piece.numel()].copy_(piece.to(there.dtype))
            if parameter not in self._fetched:
                self.copied["host", "device"] += piece.numel() * there.element_size()

        rooms = [aligned(3 * BLOCK_BYTES) for _ in range(THREADS)]
        self._rooms = [room for _, room in rooms]
        return StreamedAdamW(groups, defaults, places, rooms, give)

    def _room(self, values: Tensor, *, pinned: bool) -> Tensor:
        """Return memory of the host for as many numbers; of a GPU's, pinned, so that copies run beside kernels."""
        self._pinned.append(host_buffer(values.nbytes, pinned=pinned))  # pinned as long as it is held
        return self._pinned[-1].view(values.dtype).view(values.shape)

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that the optimizer updates in place of this one; itself, where it is not updated on the
        host."""
        return self.copies.get(parameter, parameter)

    def tensors(self) -> list[Tensor]:
        """Return all that is in memory: the room for gradients, buffers for their sums, and the copies, but for weights
        that wait there anyhow; of a file, the blocks that are on their way."""
        copies = [copy for parameter, copy in self.copies.items() if parameter not in self._fetched]
        buffers = self._sums.rooms if self._sums else []
        return [*self._gradients.values(), *(self._rooms if self.scratch else copies), *buffers]

    def states(self, states: Mapping[Any, Mapping[str, Tensor]]) -> list[Tensor]:
        """Return those of the optimizer's states, by what it updates, that are in memory and of copies: of a file, the
        counts."""
        own = [states.get(copy, {}) for copy in self.copies.values()]
        return [value for each in own for name, value in each.items() if name == "step" or not self.scratch]

    def read(self) -> None:
        """Have the copies take the values of weights that have been filled anew, or the device, where the copies were
        filled."""
        with torch.no_grad():
            for parameter, copy in self.copies.items():
                if waits(parameter) and parameter not in self._fetched:
                    local(parameter.detach()).copy_(local(copy))
                elif parameter not in self._places:
                    local(copy).copy_(local(kept(parameter)))
        if self.scratch:
            self.scratch.settle()

    def _arrived(self, parameter: nn.Parameter) -> None:
        if self.last or self._sums:
            self._take(parameter)

    def _take(self, parameter: nn.Parameter) -> None:
        """Have a whole gradient leave. The device holds it until the next one leaves, by when its copy is done."""
        assert parameter.grad is not None
        gradient, total = local(parameter.grad), local(self._gradients[parameter])
        adds, room = self._sums if self.copies[parameter].grad is not None else None, total
        if adds:
            room = adds.room()[: gradient.nbytes].view(gradient.dtype).view(gradient.shape)
        copied = None
        if self._stream is None:
            room.copy_(gradient)
        else:
            current = torch.cuda.current_stream(gradient.device)
            if self._leaving is not None and self._leaving[1] is not None:
                current.wait_event(self._leaving[1])  # then its memory may be used again
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                room.copy_(gradient, non_blocking=True)
                copied = self._stream.record_event()
        if adds and copied is None:
            total.add_(room)
        elif adds:
            adds.tell(_add, room, total, copied)
        self.copied["device", "host"] += gradient.nbytes
        self._leaving = gradient, copied
        self.copies[parameter].grad = self._gradients[parameter]
        parameter.grad = None

    def take_rest(self) -> None:
        """Have those gradients leave that are still on the device: backward is over, and all are whole. When this
        returns, all are on the host."""
        for parameter in self.copies:
            if parameter.grad is not None:
                self._take(parameter)
        if self._stream is not None:
            self._stream.synchronize()
        if self._sums:
            self._sums.settle()
        self.returning.settle()
        self._leaving = None

    def give_back(self) -> None:
        """Give the device the updated weights, for which the rooms of gradients are used; those that wait on the host
        are there already, or get there from a file."""
        with torch.no_grad():
            for parameter in self._fetched if self.scratch else ():
                local(kept(parameter)).copy_(local(self.copies[parameter]))
        self.copied["host", "device"] += self.returning.give()


def _add(room: Tensor, total: Tensor, copied: torch.cuda.Event) -> None:
    """Add what is in a room to a sum, once it has been ``copied`` there: in another thread, for which ``take_rest``
    waits before anything reads the sum."""
    copied.synchronize()
    total.add_(room)


def _wide(parameter: nn.Parameter) -> Tensor:
    """Return a tensor as this rank's piece of a parameter, in the dtype in which it is updated, without memory."""
    return torch.empty(local(parameter.detach()).shape, dtype=gradient_dtype(parameter), device="meta")
