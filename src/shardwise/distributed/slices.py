"""The part of a global tensor that this rank holds. It is read from a DTensor's placements, without a collective or a
DTensor operation."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from shardwise.distributed.torch_private import is_strided
from shardwise.spec.layout import cut


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor (the same memory), or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_slice(tensor: Tensor) -> tuple[slice, ...]:
    """Return for each dim the range of the global tensor that this rank holds. Dims are cut as by ``torch.chunk``:
    equal pieces, rounded up, and the remainder (perhaps nothing) for the last ranks. So every slice is one range, even
    of a dim that is cut twice."""
    ranges = [(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None:
            return tuple(slice(0, 0) for _ in ranges)
        for axis, dim in cuts(tensor):
            ranges[dim] = cut(ranges[dim], tensor.device_mesh.size(axis), coordinate[axis])
    return tuple(slice(start, stop) for start, stop in ranges)


def cuts(tensor: DTensor) -> list[tuple[int, int]]:
    """(mesh axis, dim) of every cut, in the order in which the cuts were made: that of the mesh, except that FSDP2's
    cut of a dim that another axis had already cut comes last."""
    placed = list(enumerate(tensor.placements))
    first = [(axis, kind.dim) for axis, kind in placed if isinstance(kind, Shard) and not is_strided(kind)]
    return first + [(axis, kind.dim) for axis, kind in placed if is_strided(kind)]  # type: ignore[attr-defined]


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype that the gradient of a parameter comes in: its own, unless it was told another."""
    return parameter.grad_dtype or parameter.dtype


def keep_on_host(parameter: Tensor, values: Tensor) -> None:
    """Keep the ``values`` of a parameter, from here on, in another tensor, cut over ranks as it is; its own memory has
    them only while it is computed with."""
    parameter.kept_on_host = values  # type: ignore[attr-defined]


def kept(parameter: Tensor) -> Tensor:
    """The tensor that always has the values of a parameter: its own, or that of :func:`keep_on_host`."""
    found: Tensor = getattr(parameter, "kept_on_host", parameter).detach()
    return found


def waits(parameter: Tensor) -> bool:
    """Return whether another tensor keeps the values of ``parameter``."""
    return hasattr(parameter, "kept_on_host")


def put(parameter: Tensor, values: Tensor) -> None:
    """Copy ``values``, this rank's slice, into the memory that keeps ``parameter``."""
    with torch.no_grad():
        shard = local(kept(parameter))
        if shard.numel():
            shard.copy_(values.reshape(shard.shape))


def replication(tensor: Tensor, ranks: int) -> int:
    """Return on how many of the ``ranks`` each element of ``tensor`` is held."""
    if not isinstance(tensor, DTensor):
        return ranks
    return ranks // prod(tensor.device_mesh.size(axis) for axis, _ in cuts(tensor))
