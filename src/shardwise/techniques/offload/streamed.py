"""AdamW over numbers that are on a disk: block by block each is read, updated, given to the device and written back.

A thread has one block at a time, from its read to its write, so that no read overtakes a write; several threads, each
with room of its own, keep the disk busy while others compute. The kernel is torch's fused AdamW, on pieces of one
parameter that are cut at whole vectors: what it computes is bit by bit what it computes of the whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from shardwise.distributed.slices import local
from shardwise.distributed.torch_private import fused_adamw, placed_as
from shardwise.techniques.offload.scratch import Scratch
from shardwise.techniques.offload.sizes import BLOCK_BYTES, whole_pages

Room = tuple[memoryview, Tensor]
"""Whole pages for a block of a weight and of its moments, as bytes and as a flat tensor of these."""
STATES = ("exp_avg", "exp_avg_sq")


class FileBlock(NamedTuple):
    """A piece of a parameter, whose numbers begin at ``first``; ``place``: where its weight is in the scratch file,
    before its two moments. ``settings`` are those of its group."""

    parameter: nn.Parameter
    place: int
    first: int
    numbers: int
    step: Tensor
    settings: dict[str, Any]


class StreamedAdamW(Optimizer):
    """AdamW of ``groups`` of parameters whose weights and moments are in ``scratch``: of each three places, one after
    another, from ``places`` on. A thread works in each of the ``rooms``. ``give``: called with each updated piece of a
    parameter, flat, where it begins, and the parameter. ``found_inf`` skips a step, as the fused kernel's does."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        scratch: Scratch,
        places: dict[nn.Parameter, int],
        rooms: Sequence[Room],
        give: Callable[[nn.Parameter, int, Tensor], None],
    ) -> None:
        super().__init__(groups, defaults)
        self.scratch, self.places, self.rooms, self.give = scratch, places, rooms, give
        self.found_inf: Tensor | None = None
        self.grad_scale: Tensor | None = None
        for parameter, place in places.items():
            shard = local(parameter.detach())
            places_of = enumerate(STATES, place + 1)
            moments = {name: placed_as(parameter, scratch.mapped(at, shard)) for at, name in places_of}
            self.state[parameter] = {"step": torch.zeros((), dtype=torch.float32), **moments}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.found_inf is not None and not bool(self.found_inf == 0):
            return
        blocks, lock, failed = self._blocks(), threading.Lock(), list[BaseException]()

        def work(room: Room) -> None:
            torch.set_num_threads(1)
            try:
                while not failed:
                    with lock:
                        block = next(blocks, None)
                    if block is None:
                        return
                    self._update(block, *room)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=[room], daemon=True) for room in self.rooms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]

    def _blocks(self) -> Iterator[FileBlock]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                step = self.state[parameter]["step"]
                step += 1
                shard = local(parameter.detach())
                most = BLOCK_BYTES // shard.element_size()
                for first in range(0, shard.numel(), most):
                    numbers = min(most, shard.numel() - first)
                    yield FileBlock(parameter, self.places[parameter], first, numbers, step, group)

    def _update(self, block: FileBlock, view: memoryview, room: Tensor) -> None:
        parameter, settings = block.parameter, block.settings
        gradient = local(parameter.grad).flatten()[block.first : block.first + block.numbers]  # type: ignore[arg-type]
        begin, size = block.first * gradient.element_size(), whole_pages(block.numbers * gradient.element_size())
        parts = [slice(i * BLOCK_BYTES, i * BLOCK_BYTES + size) for i in range(3)]
        for i, part in enumerate(parts):
            self.scratch.read(block.place + i, begin, view[part])
        weight, *moments = (room[part].view(gradient.dtype)[: block.numbers] for part in parts)
        fused_adamw(weight, gradient, (moments[0], moments[1]), block.step, settings)
        self.give(parameter, block.first, weight)
        for i, part in enumerate(parts):
            self.scratch.write(block.place + i, begin, view[part])
