"""Checksums of bits: of what a rank holds that others hold too, and of what it makes of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwise.distributed.meshes import Meshes
from shardwise.distributed.slices import local, local_slice, replication
from shardwise.models.blocks import numbered
from shardwise.runtime.faults.bits import Place
from shardwise.runtime.state import TrainState

FORWARD, BACKWARD = 0, 1
BEFORE_BLOCKS, BEHIND_BLOCKS = -1, 1_000_000
"""Where the ends of a model stand among the numbers of its blocks."""


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of all bits of a tensor, eight bytes at a time, modulo 2^64: a scalar where the tensor is, for
    which nothing is copied. Any one flipped bit changes it."""
    raw = local(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole = raw.numel() // 8 * 8
    return raw[:whole].view(torch.int64).sum() + raw[whole:].sum()


def of_held(state: TrainState, meshes: Meshes) -> dict[str, int]:
    """The checksums of the weights and moments that other ranks of this rank's stage hold too, by name and slice."""
    ranks, stage, found = meshes.size("stage"), meshes.index("pp"), {}
    for name, tensor in state.tensors().items():
        if ranks > 1 and replication(tensor, ranks) > 1:
            cut = ",".join(f"{part.start}:{part.stop}" for part in local_slice(tensor))
            found[f"{name.removeprefix('model.')} [{cut}] {stage}"] = checksum(tensor)
    return {name: int(one) for name, one in found.items()}


class Made:
    """The checksums of what a pass makes, by place; several times at one place are added up."""

    def __init__(self) -> None:
        self._sums: dict[Place, Tensor] = {}

    def add(self, place: Place, tensor: Tensor) -> None:
        one = checksum(tensor)
        self._sums[place] = self._sums[place] + one if place in self._sums else one

    def read(self) -> dict[Place, int]:
        return {place: int(one) for place, one in self._sums.items()}


@contextmanager
def watching_passes(parts: Sequence[nn.Module], made: Made) -> Iterator[None]:
    """Within it every block, and each end of the model, puts into ``made`` what it makes: its output, the gradient of
    that, and this rank's own gradient of its weights, before it is summed over ranks."""
    handles: list[RemovableHandle] = []
    known: dict[int, nn.Parameter] = {}  # kept, so that no other gets the same id

    def begins(place: int, name: str, module: nn.Module, args: object) -> None:
        """The weights are gathered by now."""
        for parameter in module.parameters():
            if parameter.requires_grad and id(parameter) not in known:
                known[id(parameter)] = parameter
                arrived = partial(made.add, (BACKWARD, -place, f"gradients of the weights of {name}"))
                handles.append(parameter.register_hook(arrived))

    def ends(place: int, name: str, module: nn.Module, args: object, out: object) -> None:
        for each in out if isinstance(out, tuple) else (out,):
            if isinstance(each, Tensor):
                made.add((FORWARD, place, f"the output of {name}"), each)
                if each.requires_grad:
                    each.register_hook(partial(made.add, (BACKWARD, -place, f"the gradient of the output of {name}")))

    try:
        for part in parts:
            for place, name, module in _units(part):
                handles.append(module.register_forward_pre_hook(partial(begins, place, name)))
                handles.append(module.register_forward_hook(partial(ends, place, name)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _units(part: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """The blocks of a part, and what else of it has weights: where each stands, its name, and the module."""
    of_blocks = dict(numbered(part))
    for number, block in of_blocks.items():
        yield number, f"layers.{number}", block
    within = {module for block in of_blocks.values() for module in block.modules()}
    for name, child in part.named_children():
        if not any(module in within for module in child.modules()):
            yield BEFORE_BLOCKS if name == "embed" else BEHIND_BLOCKS, name, child
