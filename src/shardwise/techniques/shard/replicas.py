"""Sums the gradients of replicated weights, bucket by bucket, while backward still runs.

The buckets depend on the model alone (:func:`buckets`), not on the order in which gradients happen to arrive, so that
their number and bytes are known before a process starts; docs/decisions/0002 says why this is not
DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import ceil
from typing import TYPE_CHECKING
from weakref import proxy

from shardwise.distributed.torch_private import in_profile
from shardwise.spec.range_names import sent_name

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup


def buckets(sizes: Sequence[tuple[str, int]], bucket_bytes: int) -> list[list[str]]:
    """Names by bucket. ``sizes`` are (name, gradient bytes) in the order of the model; gradients come in the reverse
    order, so buckets are filled from the end and closed once they reach ``bucket_bytes``: at the end of a block, or
    within one that is as large as a bucket, whose last one takes what is left. So all blocks fill them alike."""
    filled: list[list[str]] = []
    room = 0
    for _, block in groupby(reversed(sizes), lambda named: _block(named[0])):
        named = list(block)
        large, before = sum(size for _, size in named) >= bucket_bytes, len(filled)
        for place, (name, size) in enumerate(named):
            if room <= 0 and (large or place == 0):
                filled.append([])
                room = bucket_bytes
            filled[-1].append(name)
            room -= size
        if large and room > 0 and len(filled) > before + 1:
            rest = filled.pop()
            filled[-1] += rest
        if large:
            room = 0
    return filled


def _block(name: str) -> str:
    """The number of the block that a weight belongs to; of none, nothing."""
    return next((part for part in name.split(".") if part.isdigit()), "")


def blocks_of_bucket(block_bytes: int, bucket_bytes: int) -> int:
    """Return how many blocks of this size fill a bucket."""
    return max(1, ceil(bucket_bytes / max(1, block_bytes)))


class BucketQueue:
    """The buckets of gradients that are summed over one group, and how many of each are ``missing``: so many have been
    ``sent``, in their order on every rank, whatever order they fill up in."""

    def __init__(self, filled: Iterable[Sequence[object]]) -> None:
        self.missing, self.sent = [len(bucket) for bucket in filled], 0

    def arrived(self, bucket: int) -> Iterator[int]:
        """Yield the numbers of the buckets that are to be sent once one gradient more is there, of this bucket."""
        self.missing[bucket] -= 1
        while self.sent < len(self.missing) and self.missing[self.sent] == 0:
            yield self.sent
            self.sent += 1


class Replicas:
    """Sums the gradients of those of the ``named`` parameters that are trained, over ``group``."""

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], group: ProcessGroup, bucket_bytes: int, wire: torch.dtype
    ) -> None:
        from shardwise.distributed.slices import gradient_dtype, local

        parameters = {name: p for name, p in named if p.requires_grad}
        sizes = [(name, local(p).numel() * gradient_dtype(p).itemsize) for name, p in parameters.items()]
        self.group = group
        self.wire = wire
        self.active = True
        mixed = [[parameters[name] for name in names] for names in buckets(sizes, bucket_bytes)]
        self.buckets = [list(alike) for bucket in mixed for _, alike in groupby(bucket, gradient_dtype)]
        self._reset()
        weakly = proxy(self)  # or parameter, hook and parameter would hold one another, where no collector looks
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: weakly._arrived(index))

    def _reset(self) -> None:
        self._queue = BucketQueue(self.buckets)
        self._sent: list[tuple[torch.Tensor, torch.distributed.Work]] = []

    def _arrived(self, index: int) -> None:
        if self.active:
            for filled in self._queue.arrived(index):
                self._send(filled)

    def _send(self, index: int) -> None:
        with in_profile(sent_name("all_reduce", "gradients", f"bucket {index}")):
            self._sum(self.buckets[index])

    def _sum(self, bucket: list[nn.Parameter]) -> None:
        import torch
        from torch import distributed

        from shardwise.distributed.slices import gradient_dtype, local

        zeros = (torch.zeros_like(p, dtype=gradient_dtype(p)) if p.grad is None else p.grad for p in bucket)
        gradients = [local(gradient) for gradient in zeros]
        if len(bucket) == 1 and gradients[0].is_contiguous():
            flat = gradients[0].view(-1)
        else:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        for parameter, piece in _pieces(flat, bucket):
            parameter.grad = _as(parameter, piece)
        del gradients
        wired = flat.to(self.wire)
        work = distributed.all_reduce(wired, group=self.group, async_op=True)
        assert work is not None
        self._sent.append((wired, work))

    def wait(self) -> None:
        """Waits for every bucket. One with missing gradients (of an unused layer) is sent first, with zeros in their
        place."""
        if not self.active:
            return
        while len(self._sent) < len(self.buckets):
            self._send(len(self._sent))
        from shardwise.distributed.slices import gradient_dtype, local

        for bucket, (wired, work) in zip(self.buckets, self._sent, strict=True):
            work.wait()
            if wired.dtype != gradient_dtype(bucket[0]):
                for parameter, piece in _pieces(wired, bucket):
                    assert parameter.grad is not None
                    local(parameter.grad).copy_(piece)
        self._reset()


def _pieces(flat: torch.Tensor, bucket: list[nn.Parameter]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Each parameter with its part of a flat bucket, a view."""
    from shardwise.distributed.slices import local

    offset = 0
    for parameter in bucket:
        like = local(parameter.detach())
        yield parameter, flat[offset : offset + like.numel()].view_as(like)
        offset += like.numel()


def _as(parameter: nn.Parameter, piece: torch.Tensor) -> torch.Tensor:
    """``piece`` as the local part of a gradient of ``parameter``, which another axis may cut."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return piece
    mesh = parameter.device_mesh
    placements = parameter.placements
    shape = parameter.shape
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=shape, stride=parameter.stride())
