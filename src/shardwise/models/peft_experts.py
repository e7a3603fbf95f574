"""Adapters of experts in PEFT's format. There, as in transformers' modules, gate and up of all experts of a layer are
one parameter, and so is down; each has one adapter, A [E*R,in] and B [out,R*E], of which expert e has rows e*R to
e*R + R of A, and every E-th column of B from e on.

The adapters of gate and up, of rank r, are one of rank 2r, of whose B the rest is zero. An adapter of PEFT's own has
one A for both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.models.config import ModelSpec
from shardwise.models.families import FAMILIES
from shardwise.models.family import Stack
from shardwise.models.roles import role
from shardwise.models.tensorfile import Entry

FUSED = ("expert_gate", "expert_up")
NAMES = {"expert_gate": "gate_up_proj", "expert_up": "gate_up_proj", "expert_down": "down_proj"}
"""The parameter of transformers' modules in which a role's matrices are."""
CONTAINER = ".experts"


def parameter_of(layer: str) -> str:
    """``layers.3.mlp.experts.expert_up`` -> ``model.layers.3.mlp.experts.gate_up_proj``."""
    container, _, kind = layer.rpartition(".")
    return f"model.{container}.{NAMES[kind]}"


def place_of(module: str, modules: Collection[str]) -> str:
    """Return where PEFT keeps a module's adapter. That of a parameter of experts is at the module that holds them;
    where two have adapters there, the first is the inner one."""
    container, _, name = module.rpartition(".")
    if not container.endswith(CONTAINER):
        return module
    inner = name == "gate_up_proj" and f"{container}.down_proj" in modules
    return f"{container}.base_layer" if inner else container


def targeted(names: object) -> set[str]:
    """Return which parameters of experts are among what a config has as ``target_parameters``."""
    found = {str(name).rpartition(".")[2] for name in names} if isinstance(names, list) else set()
    return found & {*NAMES.values()}


@dataclass(frozen=True)
class Fused:
    """The form in which PEFT's adapter of one parameter holds those of ``members``, parameters of one word (lora_a or
    lora_b) with these ``shapes``. ``interleaved``: its rows are those of gate and up in turn."""

    members: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    rank: int
    experts: int
    interleaved: bool

    @classmethod
    def of(cls, members: Sequence[str], shapes: Mapping[str, tuple[int, ...]], rank: int, spec: ModelSpec) -> Fused:
        form = FAMILIES[spec.family].names.get("layers.{}.mlp.experts.expert_gate.weight")
        interleaved = isinstance(form, Stack) and form.interleaved
        return cls(tuple(members), tuple(shapes[name] for name in members), rank, spec.experts.num_experts, interleaved)

    @property
    def kind(self) -> str:
        return role(self.members[0])

    def _slot(self, name: str) -> int:
        return FUSED.index(layer) if (layer := name.split(".")[-3]) in FUSED else 0

    @property
    def _slots(self) -> int:
        """The number of matrices that the parameter has rows of, whether all have adapters or not."""
        return 2 if self.members[0].split(".")[-3] in FUSED else 1

    def shape(self, *, shared: bool = False) -> tuple[int, int]:
        """Return the shape of PEFT's tensor; ``shared``: of one that has one A for all members."""
        ranks = self.experts * self.rank * (1 if shared else len(self.members))
        if self.kind == "lora_a":
            return ranks, self.shapes[0][1]
        return self._slots * (self.shapes[0][0] // self.experts), ranks

    def packed(self, each: Sequence[Tensor]) -> Tensor:
        """PEFT's tensor of the members' values."""
        own = [one.unflatten(0, (self.experts, -1)) for one in each]
        if self.kind == "lora_a":
            return torch.cat(own, 1).flatten(0, 1)
        rows, r = own[0].shape[1], self.rank
        whole = own[0].new_zeros(self.experts, self._slots * rows, len(own) * r)
        for place, (name, one) in enumerate(zip(self.members, own, strict=True)):
            first = self._slot(name) * rows
            whole[:, first : first + rows, place * r : (place + 1) * r] = one
        if self.interleaved and self._slots > 1:
            whole = whole.unflatten(1, (self._slots, -1)).transpose(1, 2).flatten(1, 2)
        return whole.permute(1, 2, 0).flatten(1)

    def unpacked(self, whole: Tensor) -> dict[str, Tensor]:
        """The values of each member, of PEFT's tensor."""
        return {name: one.flatten(0, 1) for name, one in self._parts(whole).items()}

    def mixed(self, whole: Tensor) -> bool:
        """Return whether the tensor holds anything that is no member's own."""
        return self.kind == "lora_b" and int(whole.count_nonzero()) > sum(
            int(one.count_nonzero()) for one in self._parts(whole).values()
        )

    def _parts(self, whole: Tensor) -> dict[str, Tensor]:
        r, experts = self.rank, self.experts
        if self.kind == "lora_a":
            each = whole.unflatten(0, (experts, -1))
            shared = each.shape[1] == r
            return {name: each if shared else each[:, r * i : r * (i + 1)] for i, name in enumerate(self.members)}
        each = whole.unflatten(1, (-1, experts)).permute(2, 0, 1)
        shared = each.shape[2] == r
        if self.interleaved and self._slots > 1:
            each = each.unflatten(1, (-1, self._slots)).transpose(1, 2).flatten(1, 2)
        rows = each.chunk(self._slots, 1)
        return {
            name: rows[self._slot(name)][..., :r] if shared else rows[self._slot(name)][..., r * i : r * (i + 1)]
            for i, name in enumerate(self.members)
        }


@dataclass(frozen=True)
class Member:
    """A parameter in PEFT's tensor of several."""

    entry: Entry
    fused: Fused

    def read(self, name: str, part: Sequence[slice]) -> Tensor:
        """A slice of the parameter. The whole tensor is read: it is thin."""
        whole = self.entry.read_finite(name, [slice(0, size) for size in self.entry.shape])
        return self.fused.unpacked(whole)[name][tuple(part)].contiguous()
