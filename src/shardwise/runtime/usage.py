"""The parameters that had a gradient in a step, on any rank: in a user's own loop a model may route.

    used on no rank        ``grad`` stays None, as in torch, and an optimizer leaves the parameter alone
    used on some           zeros on the others
    a unit of its own      (of a sharded strategy) must run on all ranks alike, or what is gathered would be mixed

Every rank reduces every trained parameter, zeros where it has none; afterwards one all-reduce of a byte a parameter,
over gloo so that no GPU is waited for, tells which had none anywhere. It is needed in every step: that this rank has
all its gradients says nothing of the others. A request to stop travels with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from typing import Any
from weakref import proxy
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.distributed.meshes import Meshes
from shardwise.errors import Problem, TrainingError
from shardwise.runtime.faults.guard import StopRequest
from shardwise.runtime.objects import all_gather


class Usage:
    """Watches a parallelized ``module``; made by every rank before its first forward."""

    def __init__(self, module: nn.Module, meshes: Meshes, zeros_sent: bool) -> None:
        """``zeros_sent``: gradients that a rank does not have are reduced as zeros. Where this torch cannot, all ranks
        must have the same ones."""
        self.zeros_sent = zeros_sent
        self.meshes, self.ranks = meshes, meshes.size("world")
        self.request: StopRequest | None = None
        self.stop = False
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._used: set[str] = set()
        self._open = False
        self._units: list[str] = []
        self._reached: set[str] = set()
        self._events: list[str] = []
        self._watched: set[int] = set()
        if self.ranks == 1:
            return
        self._watch("", module)
        units: dict[str, nn.Module] = dict(module.named_modules())
        for name, unit in units.items():
            if isinstance(unit, FSDPModule):
                unit.register_forward_pre_hook(partial(self._enter, name))
                unit.register_forward_hook(partial(self._leave, name))

    def begin(self) -> None:
        """Call before each backward. A gradient that exists before the first one of a step is kept."""
        self._reached.clear()
        if not self._open:
            self._open = True
            self._used = {name for name, p in self._parameters.items() if p.grad is not None}

    def end_step(self) -> None:
        """Call after the last backward of a step. Raises TrainingError (OWN001) on all ranks if they ran different
        units: then the step must not be used."""
        asked = bool(self.request)
        if self.ranks == 1:
            self.stop |= asked
            return
        names = list(self._parameters)
        events = self._events
        self._events = []
        self._open = False
        order = [*crc32("\n".join(events).encode()).to_bytes(4, "little")]
        bits = [int(name in self._used) for name in names]
        told = torch.tensor([*bits, int(asked), *order, *(255 - byte for byte in order)], dtype=torch.uint8)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.meshes.groups["world"])
        numbers = told.tolist()
        if [255 - byte for byte in numbers[-4:]] != numbers[-8:-4]:
            raise TrainingError(_apart(events))
        self.stop |= bool(numbers[len(names)])
        for name, used in zip(names, numbers, strict=False):
            if not used:
                self._parameters[name].grad = None

    def forget(self) -> None:
        """Forget the request to stop: nobody asks for it any more, until a next loop does."""
        self.request, self.stop = None, False

    def _watch(self, prefix: str, module: nn.Module) -> None:
        """Have the gradients of a unit's parameters noted. Sharded parameters get gradients as plain tensors, which
        exist from the unit's first gathering on."""
        for name, parameter in module.named_parameters(prefix):
            if _whole(parameter) and parameter.requires_grad and id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                # Weakly: a parameter that holds what holds it, through a hook, is never freed.
                parameter.register_post_accumulate_grad_hook(partial(Usage._arrived, proxy(self), name))

    def _arrived(self, name: str, parameter: Tensor) -> None:
        self._used.add(name)
        if not self.zeros_sent:
            self._events.append(f"a gradient of {name}")

    def _enter(self, name: str, unit: nn.Module, args: Any) -> None:
        self._watch(name, unit)
        if torch.is_grad_enabled():
            self._events.append(f"forward of {name}")

    def _leave(self, name: str, unit: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in _tensors(output):
                tensor.register_hook(lambda _: self._reach(name))

    def _reach(self, name: str) -> None:
        if name not in self._reached:
            self._reached.add(name)
            self._events.append(f"backward of {name}")


def _whole(parameter: nn.Parameter) -> bool:
    """Return whether gradients arrive at the parameter itself: data-parallel ranks do not each hold a slice of it."""
    return not isinstance(parameter, DTensor) or parameter.device_mesh.mesh_dim_names == ("tp",)


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in what a module returns that have a gradient."""
    if isinstance(output, Tensor):
        if output.requires_grad:
            yield output
    elif isinstance(output, dict | list | tuple):
        for item in output.values() if isinstance(output, dict) else output:
            yield from _tensors(item)


def _apart(events: list[str]) -> Problem:
    """The problem that names what ranks ran differently. One gather, on all ranks."""
    everyone = all_gather(events)
    rank = next(rank for rank, other in enumerate(everyone) if other != everyone[0])
    pair = next(pair for pair in zip_longest(everyone[0], everyone[rank]) if pair[0] != pair[1])
    told = [event or "the end of the step" for event in pair]
    what = f"ranks did different work: {told[0]} on rank 0, {told[1]} on rank {rank}; all must do it at once"
    blocks = [event.partition(" of ")[2] for event in pair if event]
    if any(event.startswith("a gradient") for event in pair if event):
        fix = "a newer torch (2.13 sends zeros for gradients that a rank does not have), or strategy ddp"
        return Problem("OWN001", what, ", ".join(blocks), fix)
    lists = sorted({block.rpartition(".")[0] or block for block in blocks if block})
    fix = f"shardwise.parallelize(model, plan, mesh, whole={lists}): these are then gathered with the rest"
    return Problem("OWN001", what, ", ".join(filter(None, blocks)), fix)
