"""AdamW over numbers that are on a disk: block by block each is read, updated, given to the device and written back.

A thread has one block at a time, from its read to its write, so that no read overtakes a write; several threads, each
with room of its own, keep the disk busy while others compute. The kernel is torch's fused AdamW, on pieces of one
parameter that are cut at whole vectors: what it computes is bit by bit what it computes of the whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

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


Block = tuple[nn.Parameter, int, int, dict[str, Any]]
"""A piece of a parameter: where its numbers begin, how many they are, and the settings of the parameter's group."""


class StreamedAdamW(Optimizer):
    """AdamW of ``groups`` of parameters whose weights and moments are in files: of each three ``places``. A thread
    works in each of the ``rooms``. ``give``: called with each updated piece of a parameter, flat, where it begins, and
    the parameter. ``found_inf`` skips a step, as the fused kernel's does."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        places: Mapping[nn.Parameter, Sequence[tuple[Scratch, int]]],
        rooms: Sequence[Room],
        give: Callable[[nn.Parameter, int, Tensor], None],
    ) -> None:
        super().__init__(groups, defaults)
        self.places = places
        self.rooms = rooms
        self.give = give
        self.found_inf: Tensor | None = None
        self.grad_scale: Tensor | None = None
        for parameter, (_, *moments_at) in places.items():
            shard, states = local(parameter.detach()), zip(STATES, moments_at, strict=True)
            moments = {name: placed_as(parameter, file.mapped(at, shard)) for name, (file, at) in states}
            self.state[parameter] = {"step": torch.zeros((), dtype=torch.float32), **moments}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.found_inf is not None and not bool(self.found_inf == 0):
            return
        blocks = self._blocks()
        lock = threading.Lock()
        failed = list[BaseException]()

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

    def _blocks(self) -> Iterator[Block]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self.state[parameter]["step"] += 1
                shard = local(parameter.detach())
                most = BLOCK_BYTES // shard.element_size()
                for first in range(0, shard.numel(), most):
                    yield parameter, first, min(most, shard.numel() - first), group

    def _update(self, block: Block, view: memoryview, room: Tensor) -> None:
        parameter, first, numbers, settings = block
        gradient = local(parameter.grad).flatten()[first : first + numbers]  # type: ignore[arg-type]
        begin, size = first * gradient.element_size(), whole_pages(numbers * gradient.element_size())
        parts = [slice(i * BLOCK_BYTES, i * BLOCK_BYTES + size) for i in range(3)]
        places = [*zip(self.places[parameter], parts, strict=True)]
        for (file, place), part in places:
            file.read(place, begin, view[part])
        weight, *moments = (room[part].view(gradient.dtype)[:numbers] for part in parts)
        fused_adamw(weight, gradient, (moments[0], moments[1]), self.state[parameter]["step"], settings)
        self.give(parameter, first, weight)
        for (file, place), part in places:
            file.write(place, begin, view[part])
