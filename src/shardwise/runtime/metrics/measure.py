"""Measures one step: the bytes that torch allocates, by category, and the bytes that are sent, by group and kind."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import techniques
from shardwise.distributed.calls import collective, group_name, payload_bytes
from shardwise.distributed.meshes import Meshes
from shardwise.distributed.slices import local
from shardwise.runtime.report.results import Memory
from shardwise.runtime.report.warn import only_reports
from shardwise.runtime.state import TrainState
from shardwise.spec.sheet import is_control
from shardwise.techniques import offload
from shardwise.techniques.compile import suspended


@dataclass(frozen=True)
class Call:
    """One collective of this rank. ``bytes`` is the payload: the larger of what goes in and what comes out."""

    group: str
    kind: str
    bytes: int


def by_axis(calls: Iterable[Call], axes: Mapping[str, str]) -> dict[tuple[str, str], tuple[int, int]]:
    """(axis, kind) -> (bytes, count). ``axes`` maps a group's name to its axis; small ones count as ``control``."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for call in calls:
        axis = "control" if is_control(call.kind, call.bytes) else axes.get(call.group, "world")
        total, count = found.get((axis, call.kind), (0, 0))
        found[axis, call.kind] = total + call.bytes, count + 1
    return found


class _CollectiveRecorder(TorchDispatchMode):
    """Sees every collective as it is called, from Python or from autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if steps := techniques.steps_of(func._schema.name):
            with self:
                return steps(*args)
        kind = collective(func)
        out = func(*args, **(kwargs or {}))
        if kind:
            self.calls.append(Call(group_name(args), kind, payload_bytes(args, out)))
        return out


@contextmanager
def record_traffic() -> Iterator[list[Call]]:
    """Record this rank's collectives. Compiled code cannot be watched, so it runs uncompiled meanwhile; it sends the
    same."""
    with suspended(), _CollectiveRecorder() as recorder:
        yield recorder.calls


def state_bytes(state: TrainState) -> dict[str, int]:
    """Bytes of the weights' and moments' local shards on this rank (each moment with its step count). What is kept on
    the host counts where the device is the host."""
    weights, kept = state.parameters().values(), state.optimizer.state
    here = [weight for weight in weights if state.updated(weight) is weight]
    moments = [value for weight in here for value in kept.get(weight, {}).values()]
    moved = [room for each in offload.moved(state.parts) for room in each.rooms]
    found = {"weights": _storage_bytes(weights), "moments": _storage_bytes(moments)}
    if state.host:
        moved += [*state.host.tensors(), *state.host.states(kept)]
    if moved:
        found["offloaded"] = 0 if any(local(weight).is_cuda for weight in weights) else _storage_bytes(moved)
    return found


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = (local(tensor.detach()).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def resident_bytes() -> int:
    """Memory of this process that is resident now (RSS)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def return_freed_memory() -> None:
    """Return freed memory to the system. glibc's heap would keep it and grow by what does not fit into its gaps (over
    420 steps of the quickstart from 0.8 to 1.6 GiB). Takes 10 to 20 ms; does nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def highest_bytes(profiler: Any) -> int:
    """The highest running sum of the bytes allocated and freed since the profile began."""
    records = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    running = peak = 0
    for event in sorted(records, key=lambda event: event.start_ns()):
        running += event.nbytes()
        peak = max(peak, running)
    return peak


def start_quietly(profiler: Any) -> None:
    """Start a profiler that records memory. When it first sees memory freed that is older than itself, and every
    thousandth time, torch writes a line to the terminal (c10/core/CPUAllocator.cpp): no fault of the run, whose first
    such line is brought about here, where it can be held back. All else that is written meanwhile is passed on."""
    older, terminal = torch.empty(1), os.dup(2)
    with TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            profiler.start()
            del older
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
        held.seek(0)
        os.write(2, b"".join(line for line in held if b"Memory block of unknown size" not in line))


class Meter:
    """Measures two early steps of a process: traffic at its second, memory at its third (what comes once, such as
    compilation, is over by then). Neither changes any number; ``measured``: the last step was slowed by it."""

    TRAFFIC_STEP = 2
    MEMORY_STEP = 3

    def __init__(self, meshes: Meshes, device: torch.device) -> None:
        self.memory: Memory | None = None
        self.traffic: dict[tuple[str, str], tuple[int, int]] = {}
        self.measured = False
        self._axes = meshes.called()
        self._device = device
        self._steps = 0

    @contextmanager
    def measuring(self, state: TrainState) -> Iterator[None]:
        """One optimizer step runs inside, measured if it is its turn."""
        self._steps += 1
        self.measured = self._steps <= self.MEMORY_STEP
        if self._steps == self.TRAFFIC_STEP:
            with record_traffic() as calls:
                yield
            with only_reports("measuring the traffic"):
                self.traffic = by_axis(calls, self._axes)
        elif self._steps == self.MEMORY_STEP:
            held: dict[str, int] = {}
            with only_reports("measuring the memory"):
                held = state_bytes(state)
            with _peak_bytes(self._device, sum(held.values())) as peak:
                yield
            if peak:
                self.memory = Memory(held, peak[0], resident_bytes())
        else:
            yield


@contextmanager
def _peak_bytes(device: torch.device, held_bytes: int) -> Iterator[list[int]]:
    """Puts the peak of torch's allocations into the list it yields: on a GPU what the allocator counted, on a CPU
    ``held_bytes`` and the highest sum of the profiler's memory records."""
    found: list[int] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        found.append(int(torch.cuda.max_memory_allocated(device)))
        return
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with only_reports("measuring the memory"):
        start_quietly(profiler)
    try:
        yield found
    finally:
        with only_reports("measuring the memory"):
            profiler.stop()
            found.append(held_bytes + highest_bytes(profiler))
