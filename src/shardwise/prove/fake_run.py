"""A world of any size in one process: the real techniques and the real step, on a fake process group.

What they send and hold is recorded and can be compared, to the byte, with what the planner said of the same plan.
Tensors are fake, so a model of any size fits; those of a small model are real, which takes a quarter of the time.
Memory that nobody writes, such as what other ranks would have sent, holds small numbers; no value is ever compared.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import techniques
from shardwise.data.micro_batch import MicroBatch
from shardwise.distributed.calls import collective, group_name, payload_bytes
from shardwise.distributed.fake_world import fake_world
from shardwise.distributed.meshes import Meshes
from shardwise.distributed.slices import local
from shardwise.distributed.torch_private import group_named, watch_resizes
from shardwise.models.blocks import each_named, spec_of
from shardwise.models.config import ModelSpec, parameter_count
from shardwise.models.hf_model import model_of
from shardwise.models.moe import MoE
from shardwise.planner.recorder import Storages, plain_tensors
from shardwise.runtime import reduce
from shardwise.runtime import step as steps
from shardwise.runtime.build import allocate, optimizer_of
from shardwise.runtime.passes import StepRules, finish_of
from shardwise.runtime.pipeline import Sending
from shardwise.runtime.state import TrainState
from shardwise.spec.plan import Plan
from shardwise.spec.recipe import Method, OptimSection
from shardwise.spec.sheet import CONTROL_BYTES
from shardwise.techniques import offload
from shardwise.techniques.offload.activations import MovedInputs
from shardwise.techniques.optim import elementwise
from shardwise.techniques.optim.elementwise import pieces

SMALL = 2**20
"""Up to this many parameters, real tensors are faster than fake ones."""

UNWRITTEN = 0x2C
"""Each byte of memory that is not written: 2e-12 in fp32 and bf16, 0.07 in fp16, so that nothing becomes infinite."""

Sent = Counter[tuple[str, str, int]]
"""(group, as the layout calls it, kind, bytes of one call) -> calls."""


@dataclass
class StepBytes:
    """One step of one rank, as the runtime did it or as the planner says. ``state`` are bytes by category;
    ``saved_bytes`` is what the first micro-batch's forward leaves for its backward, gathered weights included;
    ``peak_bytes`` the most alive at any moment, on the host too; ``copied``, bytes by (from, to)."""

    sent: Sent = field(default_factory=Counter)
    state: dict[str, int] = field(default_factory=dict)
    saved_bytes: int = 0
    peak_bytes: int = 0
    copied: dict[tuple[str, str], int] = field(default_factory=dict)


class WorldCounter(TorchDispatchMode):
    """Counts collectives, and bytes alive on fake tensors of one mode, or without one on real tensors. FSDP2 frees
    gathered weights by emptying their storage, so resizes count too."""

    def __init__(self, fake: FakeTensorMode | None, axes: dict[str, str]) -> None:
        super().__init__()
        self.fake, self.axes = fake, axes
        self.sent: Sent = Counter()
        self.storages = Storages(self._freed)
        self.sizes: dict[int, int] = {}
        self.alive_bytes = self.peak_bytes = 0

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        stored = self.storages.known.get(storage._cdata)
        if stored is not None:
            self._count(stored.index, size)
            if self.fake is None:
                storage.fill_(UNWRITTEN)  # type: ignore[attr-defined]  # torch does not declare it

    def _count(self, index: int, size: int) -> None:
        self.alive_bytes += size - self.sizes.get(index, 0)
        self.sizes[index] = size
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)

    def _freed(self, index: int) -> None:
        self.alive_bytes -= self.sizes.pop(index)

    def held_bytes(self, tensors: list[torch.Tensor]) -> int:
        """Bytes of the storages under ``tensors``, as counted: a fake one whose memory was given up has it again once
        it is viewed."""
        found = {stored.index for tensor in tensors if (stored := self.storages.find(tensor)) is not None}
        return sum(self.sizes[index] for index in found)

    def _counts(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor counts: not those with which DTensor computes shapes, nor those on the meta
        device."""
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode is self.fake
        return self.fake is None and tensor.device.type == "cpu"

    def _sent(self, kind: str, args: Any, out: Any) -> None:
        """Books a collective, unless its group is this rank alone. Along one axis the group of the whole world is the
        axis's own: a control message is told by its size. FSDP2 makes groups to gather from part of an axis."""
        group, size = group_name(args), payload_bytes(args, out)
        ranks = group_named(group).size()
        if ranks > 1:
            part = "world" if ranks == dist.get_world_size() else f"fsdp/{ranks}"
            control = size <= CONTROL_BYTES and ranks == dist.get_world_size()
            axis = "world" if control else self.axes.get(group, part)
            self.sent[axis, kind, size] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it will come back as operations on local shards
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # half of all that is asked
        if func is torch.ops.aten._local_scalar_dense.default and self._counts(args[0]):
            return 1.0 if args[0].is_floating_point() else 1  # any number will do: it decides nothing that is counted
        if steps := techniques.steps_of(func._schema.name):
            with self:
                return steps(*args)
        out = func(*args, **(kwargs or {}))
        if kind := collective(func):
            self._sent(kind, args, out)
        for tensor in plain_tensors(out):
            if self._counts(tensor):
                stored, new = self.storages.add(tensor)
                if new:
                    self._count(stored.index, stored.bytes)
                if new and self.fake is None and "empty" in func.__name__:
                    tensor.untyped_storage().fill_(UNWRITTEN)  # type: ignore[attr-defined]
        return out


def measure(spec: ModelSpec, plan: Plan, rank: int = 0, fake: bool | None = None) -> StepBytes:
    """Runs two steps of ``plan`` as ``rank`` of its world and measures the second, on fake tensors or on real ones; if
    not told, on fake ones unless the model is small."""
    settings = OptimSection()
    if fake is None:
        fake = parameter_count(spec) > SMALL
    plan = replace(plan, expert_imbalance=1.0)  # rows that nobody sends are taken to be as many for each rank
    with fake_world(plan.layout, rank) as groups:
        tracker = WorldCounter(FakeTensorMode(allow_non_fake_inputs=True) if fake else None, groups.called())
        with (
            watch_resizes(tracker.resize),
            patch.object(Sending, "left", lambda _: True),
            patch.object(elementwise, "pieces", _ends) if fake else nullcontext(),
        ):
            parts = _parts(spec, plan, groups, tracker)
            with tracker.fake or nullcontext(), tracker:
                host = offload.host_weights(parts, plan)
                state = TrainState(parts, optimizer_of(parts, settings, plan, host), host=host)
                finish = finish_of(Method(name=plan.method.name), plan)
                rules = StepRules(plan, groups, settings, 100, finish)
                with nullcontext() if host else patch.object(state.optimizer, "step"):
                    _step(state, rules, plan.batch.accumulation if plan.layout.pp > 1 else 1)  # FSDP2 sets itself up
                tracker.sent.clear()
                tracker.peak_bytes = tracker.alive_bytes
                return _measured_step(state, rules, tracker)


def _ends(length: int, each: int) -> list[slice]:
    """Return the first and the last piece of a weight that is updated: those between hold and send no more."""
    found = pieces(length, each)
    return [*found[:1], *found[1:][-1:]]


def _parts(spec: ModelSpec, plan: Plan, groups: Meshes, tracker: WorldCounter) -> list[torch.nn.Module]:
    """Make the parts of the model as runtime/build.py does; techniques are applied outside the fake mode: meshes do
    real arithmetic."""
    with torch.device("meta"):
        parts: list[torch.nn.Module] = [model_of(spec)]

    def fill(parts: list[torch.nn.Module]) -> None:
        with tracker.fake or nullcontext(), tracker:
            allocate(parts, spec, torch.device("cpu"), plan)

    for module in parts[0].modules():
        if isinstance(module, MoE):
            module.room = None  # on paper routing is even, and nothing is dropped
    return techniques.apply(parts, plan, groups, fill)


def _measured_step(state: TrainState, rules: StepRules, tracker: WorldCounter) -> StepBytes:
    result = StepBytes()
    before: list[int] = []

    def enter(phase: str) -> None:
        if phase == "forward":
            before.append(tracker.alive_bytes)
        if phase == "backward" and not result.saved_bytes:
            result.saved_bytes = tracker.alive_bytes - before[0]
        if phase == "optimizer":
            gradients = [p.grad for p in state.trained() if p.grad is not None]
            result.state["gradients"] = _storage_bytes(gradients)

    moved = offload.moved(state.parts)
    copied = [each.copied for each in moved]
    copied += [state.host.copied] if state.host else []
    for counted in copied:
        counted.clear()
    _step(state, replace(rules, enter=enter), rules.plan.batch.accumulation)
    for (axis, kind, size), calls in tracker.sent.items():
        result.sent[rules.plan.layout.called(axis), kind, size] += calls
    result.peak_bytes = tracker.peak_bytes
    result.state["weights"] = tracker.held_bytes([parameter for _, parameter in each_named(state.parts)])
    moments = [value for states in state.optimizer.state.values() for value in states.values()]
    result.state["moments"] = _storage_bytes(moments)
    on_host = [room for each in moved for room in each.rooms]
    if state.host:
        on_host += [*state.host.tensors(), *state.host.states(state.optimizer.state)]
    if copied:
        result.state["host"] = _storage_bytes(on_host)
        inputs = [each for each in moved if isinstance(each, MovedInputs)]
        result.state["disk"] = sum(file.begins[-1] for each in inputs for file in each.files)
    result.copied = dict(sum(copied, Counter()))
    return result


def _step(state: TrainState, rules: StepRules, micro_batches: int) -> None:
    plan = rules.plan
    shape = (plan.batch.micro_batch_size, plan.row_tokens)
    batches = []
    for _ in range(micro_batches):
        ids, labels, positions = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
        batch = MicroBatch(ids, labels, positions, None, 0)
        if spec_of(state.parts).predictors:
            batch = batch.aimed(ids.clone(), torch.zeros((*shape, 2), dtype=torch.int64))
        if plan.layout.cp > 1:
            batch.row_length, batch.reached = plan.batch.seq_len, torch.zeros(shape, dtype=torch.int64)
        if plan.method.pairs:
            batch.answers = torch.zeros(shape, dtype=torch.int64)
            batch.references = torch.zeros(shape[0], 2, dtype=torch.float64)
        batches.append(batch)
    reduce.count_supervised(rules.meshes, 1)
    steps.step(state, batches, 1, rules)


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {s._cdata: s.nbytes() for s in (local(t.detach()).untyped_storage() for t in tensors)}
    return sum(storages.values())
