"""The base of optimizers whose new weight at a place follows from weight, gradient and what is kept at that place: each
rank updates its own slices, a piece at a time, in fp32 (fp64 for fp64)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.distributed.slices import local
from shardwise.models.config import ModelSpec
from shardwise.spec.plan import Plan

Group = dict[str, Any]
PIECE = {"cpu": 2**16}
"""Elements that are updated at a time: few on a CPU, so that they stay in its cache; many on a GPU (2^22)."""


def regimes(spec: ModelSpec, plan: Plan, trained: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """Pieces of a weight, where its update comes in several."""
    return {"a weight that is updated in pieces": max(map(prod, trained.values()), default=0) > PIECE["cpu"]}


def pieces(length: int, each: int) -> list[slice]:
    """Return what is updated one after the other of a weight of ``length`` rows, or elements, ``each`` of them at most.
    Fake worlds leave out those between the first and the last (prove/fake_run.py)."""
    return [slice(first, min(first + each, length)) for first in range(0, length, each)]


class Elementwise(Optimizer):
    """An optimizer over plain and sharded parameters. What is ``kept`` of each is there from the start: zeros, sharded
    as it is."""

    kept: ClassVar[tuple[str, ...]]

    def __init__(self, groups: list[Group], **defaults: Any) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, **defaults})
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        for group in self.param_groups:
            for parameter in group["params"]:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                self.state[parameter] = {"step": step} | {key: torch.zeros_like(parameter) for key in self.kept}

    @abstractmethod
    def updated(self, grad: Tensor, group: Group, weight: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        """Return new tensors [n] for the weight and what is kept, from a piece of each."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make one update of every parameter that has a gradient. Like torch's fused AdamW, it divides gradients by
        ``grad_scale``, and changes nothing if ``found_inf`` is 1."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: Group) -> None:
        assert parameter.grad is not None
        state, grad = self.state[parameter], local(parameter.grad).reshape(-1)
        found = torch.zeros((), device=grad.device) if self.found_inf is None else self.found_inf.to(grad.device)
        state["step"] += 1 - found
        wide = torch.promote_types(grad.dtype, torch.float32)
        tensors = (grad, *(local(each.detach()).view(-1) for each in (parameter, *(state[key] for key in self.kept))))
        for part in pieces(len(grad), PIECE.get(grad.device.type, 2**22)):
            piece, *held = (each[part] for each in tensors)
            own = piece.to(wide) if self.grad_scale is None else piece.to(wide) / self.grad_scale
            for old, new in zip(held, self.updated(own, group, *(each.to(wide) for each in held)), strict=True):
                torch.where(found > 0, old, new.to(old.dtype), out=old)
