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
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Stored:
    """One piece of storage: what the first tensor on it looked like. ``index`` numbers storages from 0."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


@dataclass
class RecordedOp:
    """One operation that made or freed something: ``reads`` and ``makes`` are indices of storages. ``node`` numbers the
    autograd function written in Python in whose backward it ran; -1 elsewhere."""

    op: Any
    shapes: tuple[tuple[int, ...], ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    frees: list[int] = field(default_factory=list)
    node: int = -1


class Storages:
    """Numbers storages and tells when they die. ``on_free`` is called with the index of each."""

    def __init__(self, on_free: Callable[[int], None]) -> None:
        self.known: dict[int, Stored] = {}
        self._on_free = on_free
        self._references: dict[int, weakref.ref[Any]] = {}
        self._next = 0

    def add(self, tensor: torch.Tensor) -> tuple[Stored, bool]:
        """The storage under ``tensor`` and whether it is new."""
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
        return self.known.get(tensor.untyped_storage()._cdata)

    def _died(self, key: int, _: Any) -> None:
        stored = self.known.pop(key)
        del self._references[key]
        self._on_free(stored.index)


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
        self.node = -1

    def outside(self, tensor: torch.Tensor) -> int:
        """Makes a tensor known that came into being before; its index."""
        return self.storages.add(tensor)[0].index

    def _freed(self, index: int) -> None:
        if self.events:
            self.events[-1].frees.append(index)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = plain_tensors((args, kwargs))
        reads = [stored.index for t in inputs if (stored := self.storages.find(t)) is not None]
        makes = []
        for tensor in plain_tensors(out):
            stored, new = self.storages.add(tensor)
            if new:
                makes.append(stored.index)
                self.made[stored.index] = stored
        shapes = tuple(tuple(t.shape) for t in inputs)
        # What several nodes send to one tensor is summed after the last of them, before the next begins.
        node = -1 if func is torch.ops.aten.add.Tensor else self.node
        self.events.append(RecordedOp(func, shapes, tuple(reads), tuple(makes), node=node))
        return out

    def watch(self, end: Any) -> None:
        """From here on the events of a backward that begins at the node ``end`` tell the function they belong to."""
        found, todo = {end}, [end]
        while todo:
            after = {node for node, _ in todo.pop().next_functions if node is not None} - found
            found |= after
            todo += after
        for number, node in enumerate(found):
            node.register_prehook(partial(self._enter, number if isinstance(node, BackwardCFunction) else -1))

    def _enter(self, node: int, _: Any) -> None:
        self.node = node
