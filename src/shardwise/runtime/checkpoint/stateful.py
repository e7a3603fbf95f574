"""The other objects in a checkpoint of a user's own loop: schedulers, samplers, data loaders.

Their ``state_dict()`` becomes JSON and comes back with the same types and bits. JSON has no tensors, tuples, counters,
keys that are no texts, nor infinity: each of these is an object with one key that begins with ``$``.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Collection, Mapping
from math import isfinite
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardwise.errors import ConfigError, DataError, Problem
from shardwise.models.tensorfile import DTYPES, NAMES
from shardwise.runtime.checkpoint.host_group import HostGroup, RankError

LARGEST_BYTES = 16 << 20
"""Tensors in such a state may have at most this size: counters and generators fit, and JSON can hold them."""


@runtime_checkable
class Stateful(Protocol):
    """An object whose state a checkpoint can hold besides a model and its optimizer."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def encode(value: Any, where: str) -> Any:
    """``value`` as JSON. Raises DataError CKPT020, which says ``where``, for a type that cannot be encoded."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if isfinite(value) else {"$float": str(value)}
    if isinstance(value, list):
        return [encode(item, f"{where}.{index}") for index, item in enumerate(value)]
    if isinstance(value, tuple) and type(value) is tuple:
        return {"$tuple": encode(list(value), where)}
    if isinstance(value, dict):
        if type(value) is not Counter and all(isinstance(key, str) and key[:1] != "$" for key in value):
            return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        kind = "$counter" if type(value) is Counter else "$dict"
        return {kind: [[encode(key, where), encode(item, f"{where}.{key}")] for key, item in value.items()]}
    if isinstance(value, Tensor) and value.dtype in NAMES and value.nbytes <= LARGEST_BYTES:
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"$tensor": [NAMES[value.dtype], list(value.shape), base64.b64encode(data).decode()]}
    what, fix = f"it is of type {type(value).__name__}", "numbers, strings, lists, dicts and tensors in state_dict()"
    if isinstance(value, Tensor):
        what = f"it is a tensor of {value.nbytes:,} bytes of {value.dtype}"
        fix = f"at most {LARGEST_BYTES:,} bytes; save larger ones as parameters or buffers of the module"
    raise DataError(Problem("CKPT020", f"`{where}` cannot be kept in a checkpoint: {what}", where, fix))


def decode(value: Any) -> Any:
    """The inverse of :func:`encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict) or not value:
        return value
    kind, inner = next(iter(value.items()))
    if kind == "$float":
        return float(inner)
    if kind == "$tuple":
        return tuple(decode(inner))
    if kind in ("$dict", "$counter"):
        pairs = {decode(key): decode(item) for key, item in inner}
        return Counter(pairs) if kind == "$counter" else pairs
    if kind == "$tensor":
        dtype, shape, data = inner
        raw, empty = bytearray(base64.b64decode(data)), torch.empty(shape, dtype=DTYPES[dtype])
        return torch.frombuffer(raw, dtype=empty.dtype).reshape(shape) if raw else empty
    return {key: decode(item) for key, item in value.items()}


class Objects:
    """The objects that a checkpoint keeps beside a module and its optimizer, by name: the first rank's state of each,
    or every rank's own of those in ``per_rank``. Raises ConfigError CFG005 for a name that is none, DataError CKPT020
    for what has no state that can be kept."""

    def __init__(self, objects: Mapping[str, Any], per_rank: Collection[str], optimizer: Optimizer) -> None:
        for name in per_rank:
            if name not in objects:
                fix = f"names from {', '.join(objects) or 'those that are given, as sampler=sampler'}"
                raise ConfigError(Problem("CFG005", f"`{name}` is not one of the saved objects", "per_rank", fix))
        for name, each in objects.items():
            if not isinstance(each, Stateful):
                what = f"`{name}` is a {type(each).__name__}, which has no state_dict() and load_state_dict()"
                fix = "an object with both; a fact goes to save(step, name=fact)"
                raise DataError(Problem("CKPT020", what, name, fix))
            encode(each.state_dict(), name)
        self.objects = objects
        self.per_rank = frozenset(per_rank)
        self.optimizer = optimizer

    def collect(self, host_group: HostGroup) -> dict[str, Any]:
        """The states as JSON; whole on the first rank. Those of each rank are gathered, so all ranks call this."""
        first = {name: encode(o.state_dict(), name) for name, o in self.objects.items() if name not in self.per_rank}
        if any(isinstance(each, LRScheduler) for each in self.objects.values()):
            first["$groups"] = encode(self._groups(), "param_groups")
        if not self.per_rank:
            return {"first": first, "ranks": {}}
        try:
            everyone = host_group.each(lambda: {n: encode(self.objects[n].state_dict(), n) for n in self.per_rank})
        except RankError as error:
            raise error.first from error
        return {"first": first, "ranks": {name: [each[name] for each in everyone] for name in self.per_rank}}

    def restore(self, kept: dict[str, Any] | None, host_group: HostGroup) -> None:
        """Restore the state of each object. Raises DataError OWN002 if the checkpoint holds the states of other
        objects, or of another number of ranks."""
        first, ranks = (dict(kept["first"]), kept["ranks"]) if kept else ({}, {})
        groups = decode(first.pop("$groups", []))
        for name in sorted({*self.objects, *first, *ranks}):
            if problem := self._differs(name, first, ranks, host_group.size):
                raise DataError(problem)
        for name, each in self.objects.items():
            each.load_state_dict(decode(ranks[name][host_group.rank] if name in ranks else first[name]))
        for group, saved in zip(self.optimizer.param_groups, groups, strict=False):
            group.update(saved)

    def _differs(self, name: str, first: dict[str, Any], ranks: dict[str, Any], size: int) -> Problem | None:
        if name not in first and name not in ranks:
            what = f"the checkpoint was saved without the state of `{name}`"
            fix = f"leave out {name}={name}, resume, set it by hand, and save to another directory with it"
        elif name not in self.objects:
            what, fix = f"the checkpoint was saved with the state of `{name}`", f"Checkpoints(..., {name}=<the object>)"
        elif (name in ranks) != (name in self.per_rank):
            what = f"`{name}` was saved from {'every rank' if name in ranks else 'the first rank only'}"
            fix = f"per_rank {'with' if name in ranks else 'without'} {name!r}"
        elif name in ranks and len(ranks[name]) != size:
            what = f"`{name}` was saved for each of {len(ranks[name])} ranks, but there are {size}"
            fix = f"start {len(ranks[name])} processes"
        else:
            return None
        return Problem("OWN002", what, name, fix)

    def _groups(self) -> list[dict[str, Any]]:
        """Return what a torch scheduler sets in its optimizer (rates, betas): loading the scheduler does not restore
        it."""
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
