"""Watches tensors come and go: which operation makes each piece of storage, and when the storage is freed.

Works on fake tensors as on real ones; storages are told apart by identity, so views count once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.distributed.calls import collective, group_name
from shardwise.distributed.slices import local
from shardwise.models.layers import is_made_again


@dataclass
class Stored:
    """One piece of storage: what the first tensor on it looked like. ``index`` numbers storages from 0."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


@dataclass
class RecordedOp:
    """One operation that made or freed something: ``reads`` and ``makes`` are indices of storages; ``writes`` are
    changed in place. A collective has a ``kind``, a ``group`` and a ``payload``: the bytes that go in and that come
    out. ``read`` and ``written`` are bytes, tensor by tensor. ``again``: a program said that it is made again."""

    op: Any
    shapes: tuple[tuple[int, ...], ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    frees: list[int] = field(default_factory=list)
    writes: tuple[int, ...] = ()
    kind: str = ""
    group: str = ""
    payload: tuple[int, ...] = ()
    read: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    again: bool = False


class Storages:
    """Numbers storages and tells when they die. ``on_free`` is called with the index of each."""

    def __init__(self, on_free: Callable[[int], None]) -> None:
        self.known: dict[int, Stored] = {}
        self._on_free = on_free
        self._references: dict[int, weakref.ref[Any]] = {}
        self._next = 0

    def add(self, tensor: torch.Tensor) -> tuple[Stored, bool]:
        """The storage under ``tensor`` and whether it is new."""
        tensor = _held(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return self.known[key], False
        stored = Stored(self._next, tuple(tensor.shape), tensor.dtype, storage.nbytes())
        self._next += 1
        self.known[key] = stored
        self._references[key] = weakref.ref(storage, partial(self._died, key))
        return stored, True

    def find(self, tensor: torch.Tensor) -> Stored | None:
        return self.known.get(_held(tensor).untyped_storage()._cdata)

    def _died(self, key: int, _: Any) -> None:
        stored = self.known.pop(key)
        del self._references[key]
        self._on_free(stored.index)


def _held(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a DTensor, or any other tensor as it is; with a grad mode, asking would be an
    operation of its own."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return local(tensor)


def _bytes(tensors: list[Tensor]) -> tuple[int, ...]:
    return tuple(tensor.numel() * tensor.element_size() for tensor in tensors)


def plain_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Recorder(TorchDispatchMode):
    """Lists every operation with the storages it makes, and after it those that are freed before the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[RecordedOp] = []
        self.made: dict[int, Stored] = {}
        self.storages = Storages(self._freed)

    def outside(self, tensor: torch.Tensor) -> int:
        """Makes a tensor known that came into being before; its index."""
        return self.storages.add(tensor)[0].index

    def _freed(self, index: int) -> None:
        if self.events:
            self.events[-1].frees.append(index)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operations come here again with what this rank holds
        out = func(*args, **(kwargs or {}))
        inputs = plain_tensors((args, kwargs))
        reads = [stored.index for t in inputs if (stored := self.storages.find(t)) is not None]
        makes, written = [], []
        for tensor in plain_tensors(out):
            stored, new = self.storages.add(tensor)
            if new:
                makes.append(stored.index)
                written.append(tensor)
                self.made[stored.index] = stored
        shapes = tuple(tuple(t.shape) for t in inputs)
        changed = _changed(func, args, kwargs or {})
        writes = tuple(stored.index for t in changed if (stored := self.storages.find(t)) is not None)
        event = RecordedOp(func, shapes, tuple(reads), tuple(makes), writes=writes, again=is_made_again())
        if kind := collective(func):
            event.kind, event.group = kind, group_name(args)
            sides = (plain_tensors(side) for side in (*args, out) if isinstance(side, Tensor | list))
            event.payload = tuple(sum(_bytes(side)) for side in sides if side)
        elif makes or writes:
            event.read, event.written = _bytes(inputs), _bytes(written + changed)
        self.events.append(event)
        return out


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation changes in place, as its schema says."""
    named = zip(func._schema.arguments, args, strict=False)
    given = [*named, *((a, kwargs[a.name]) for a in func._schema.arguments[len(args) :] if a.name in kwargs)]
    return [t for argument, value in given if argument.is_write for t in plain_tensors(value)]
