"""Objects sent from rank to rank, in an encoding that cannot run code.

torch.distributed's own collectives of objects unpickle whatever arrives, and unpickling can run any command. The sender
is whoever connected to a rank's port, not necessarily a rank. Here objects are read as torch reads untrusted weights
(``weights_only``): numbers, text, containers, tensors, and the classes given to ``may_travel``.
"""

from __future__ import annotations

from ast import literal_eval
from dataclasses import is_dataclass
from enum import Enum
from io import BytesIO
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata, planner, storage
from torch.serialization import add_safe_globals

from shardwise import errors

Group = dist.ProcessGroup | None
"""A gloo group; None stands for all ranks."""
PLAIN = (errors.ShardwiseError, Enum)
SHORT_BYTES = 4096
ZIP = b"PK"
"""What torch's files begin with, and no literal does."""


def may_travel(*classes: Any) -> None:
    """Allow ranks to send instances of ``classes``: plain data, whose construction has no side effects."""
    add_safe_globals(list(classes))


# our errors, and what DCP's planners say of tensors
found = (kind for module in (errors, metadata, planner, storage) for kind in vars(module).values())
may_travel(*(kind for kind in found if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, PLAIN))))
# a pickle of protocol 2 calls exceptions as Python 2 did, and every kind of OSError by the name of the first
may_travel((OSError, "exceptions.OSError"), (RuntimeError, "exceptions.RuntimeError"))


def broadcast(value: Any, group: Group = None) -> Any:
    """The first rank's ``value``, on every rank; the others' is ignored."""
    first = dist.get_rank(group) == 0
    data = encode(value) if first else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(data)])
    dist.broadcast(size, group=group, group_src=0)
    if not first:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=0)
    return decode(data)


def gather(value: Any, group: Group = None) -> list[Any]:
    """The values of all ranks, by rank, on the first; an empty list on the others."""
    data, rank = encode(value), dist.get_rank(group)
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    sizes[rank] = len(data)
    dist.all_reduce(sizes, group=group)
    padded = torch.nn.functional.pad(data, (0, int(sizes.max()) - len(data)))
    parts = [torch.empty_like(padded) for _ in sizes] if rank == 0 else []
    dist.gather(padded, parts or None, group=group, group_dst=0)
    return [decode(part[: int(size)]) for part, size in zip(parts, sizes, strict=False)]


def all_gather(value: Any, group: Group = None) -> list[Any]:
    """The values of all ranks, by rank, on every one."""
    return broadcast(gather(value, group), group)


def send(value: Any, rank: int) -> None:
    """Send ``value`` to one rank of all, which calls :func:`receive`."""
    data = encode(value)
    dist.send(torch.tensor([len(data)]), rank)
    dist.send(data, rank)


def receive(rank: int) -> Any:
    """Return the value that rank ``rank`` sends to this one."""
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, rank)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(data, rank)
    return decode(data)


def encode(value: Any) -> Tensor:
    """``value`` as bytes: short plain ones as a literal, which the first of thousands of ranks reads a hundred times as
    fast, all others as torch saves them."""
    if _is_plain(value) and len(text := repr(value).encode()) <= SHORT_BYTES:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)
    stream = BytesIO()
    torch.save(value, stream)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8).clone()


def decode(data: Tensor) -> Any:
    """The inverse of :func:`encode`. Raises pickle.UnpicklingError for anything but plain data."""
    found = data.numpy().tobytes()
    if not found.startswith(ZIP) and len(found) <= SHORT_BYTES:
        try:
            return literal_eval(found.decode())
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UnpicklingError("this is neither a literal nor a file of torch's") from error
    return torch.load(BytesIO(found), weights_only=True)


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, str)
