"""Numbers that all ranks must share: the count of supervised tokens before backward, and after it one small all-reduce
that carries the gradient norm, the loss and the wish to stop, so that every rank takes the same decision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.techniques.slices import local, replication


@dataclass(frozen=True)
class Verdict:
    """What all ranks agree on after backward. ``squares`` is the square of the global gradient norm."""

    squares: float
    loss: float
    stop: bool

    @property
    def finite(self) -> bool:
        return isfinite(self.squares) and isfinite(self.loss)

    @property
    def norm(self) -> float:
        return self.squares**0.5 if self.squares >= 0 else self.squares


def count_supervised(tokens: int, device: torch.device) -> int:
    """The supervised tokens of the whole optimizer step: the sum of each rank's count (over its micro-batches). One
    all-reduce of 8 bytes."""
    count = torch.tensor([tokens], dtype=torch.int64, device=device)
    sum_over_world(count)
    return int(count)


def sum_over_world(numbers: Tensor) -> None:
    """Sum ``numbers`` over all ranks, in place; one process sends nothing."""
    if dist.get_world_size() > 1:
        dist.all_reduce(numbers)


def local_squares(parameters: Iterable[Tensor], ranks: int) -> Tensor:
    """Sum over this rank's gradient shards of |g|^2 / replication: a scalar in fp64, each norm taken in at least fp32.

    Summed over all ``ranks`` it is the square of the true global norm. Padding is not part of a local shard, and a tied
    parameter is one parameter, so neither counts twice.
    """
    groups: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    seen: set[int] = set()
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        shard = local(gradient)
        if shard.numel():
            groups.setdefault((replication(gradient, ranks), shard.dtype), []).append(shard)
    squares = []
    for (copies, dtype), shards in groups.items():
        wide = torch.promote_types(dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(shards, 2, dtype=wide))
        squares.append(norms.double().square().sum() / copies)
    return sum(squares[1:], start=squares[0]) if squares else torch.zeros((), dtype=torch.float64)


def agree(squares: Tensor, loss: Tensor, stop: bool) -> Verdict:
    """Sum the three over all ranks: one all-reduce of 24 bytes. ``loss`` is this rank's share of the mean loss. A NaN
    or infinity anywhere reaches every rank, so all of them skip or none does."""
    wish = torch.tensor(float(stop), dtype=torch.float64, device=loss.device)
    numbers = torch.stack([squares.to(loss.device), loss.detach().double().reshape(()), wish])
    sum_over_world(numbers)
    total, mean, stops = (float(number) for number in numbers.cpu())
    return Verdict(total, mean, stops > 0)


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """What gradients are multiplied by so that their norm is at most ``max_norm`` (as ``clip_grad_norm_``)."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


def scale_gradients(parameters: Sequence[Tensor], coefficient: float) -> None:
    """Multiply every gradient in place, shard by shard, with no DTensor operation."""
    if coefficient == 1.0:
        return
    shards: dict[torch.dtype, list[Tensor]] = {}
    for parameter in {id(parameter): parameter for parameter in parameters}.values():
        if parameter.grad is not None:
            shard = local(parameter.grad)
            shards.setdefault(shard.dtype, []).append(shard)
    for group in shards.values():
        torch._foreach_mul_(group, coefficient)
