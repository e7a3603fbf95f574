"""The distance between what two trainings return: the largest error, and where it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional
from xxhash import xxh3_64_intdigest

from shardwise.distributed.slices import local


@dataclass(frozen=True)
class Worst:
    """The largest error: of which tensor or number, and on which rank. ``expected`` and ``found`` are the values where
    they are farthest apart; NaN for what is missing."""

    error: float
    what: str
    rank: int = 0
    expected: float = field(default=math.nan, compare=False)
    found: float = field(default=math.nan, compare=False)

    @property
    def where(self) -> str:
        return f"{self.what}, rank {self.rank}"

    @property
    def values(self) -> str:
        """The two values, in words."""
        return f"{self.expected:.9g} expected, {self.found:.9g} found on rank {self.rank}"

    def __str__(self) -> str:
        return f"{self.error:.2e} ({self.where})"


Place = tuple[str, int]
"""The name of a tensor or number, and a rank."""


def worst(errors: Mapping[Place, float], values: Callable[[Place], tuple[float, float]]) -> Worst:
    """The largest error, with the two values; NaN counts as larger than any."""
    at = max(errors, key=lambda at: math.inf if math.isnan(errors[at]) else errors[at])
    return Worst(errors[at], *at, *values(at))


def farthest(known: Tensor | None, found: Tensor | None) -> tuple[float, float]:
    """The elements of two tensors that are farthest apart; NaN of one that is missing."""
    if known is None or found is None or known.shape != found.shape:
        return math.nan, math.nan
    index = (known.double() - found.double()).abs().nan_to_num(math.inf).argmax()
    return float(known.flatten()[index]), float(found.flatten()[index])


def apart(held: Sequence[Sequence[Mapping[str, list[int]]]]) -> Iterator[str]:
    """Yield a line for each piece that ranks do not hold alike, of the first step after which there is one."""
    for number, pieces in enumerate(zip(*held, strict=True)):
        first: dict[str, tuple[int, int]] = {}
        different = {}
        for rank, mine in enumerate(pieces):
            for name, digests in mine.items():
                for digest in digests:
                    other, known = first.setdefault(name, (rank, digest))
                    if digest != known:
                        different[name] = f"{name} of rank {rank} is not that of rank {other} after step {number + 1}"
        yield from different.values()
        if different:
            return


def differences(right: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative error of each tensor; infinite for one that is missing, new or of another shape."""
    errors = {name: float("inf") for name in found.keys() - right.keys()}
    for name, known in right.items():
        same = name in found and found[name].shape == known.shape
        scale = known.double().abs().max().clamp_min(1e-30)
        errors[name] = float((found[name].double() - known.double()).abs().max() / scale) if same else float("inf")
    return errors


def directions(right: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, float]:
    """1 - the cosine of the angle between each gradient and the right one; 2, the opposite, for one that is missing."""
    return {
        name: 1.0 - float(functional.cosine_similarity(known.double().flatten(), found[name].double().flatten(), dim=0))
        if name in found
        else 2.0
        for name, known in right.items()
    }


def digest(tensor: Tensor) -> int:
    """Return a digest of the bits of what this rank holds of a tensor."""
    stored = local(tensor).detach().cpu().flatten().clone().view(torch.uint8)  # numpy's memory cannot be resized
    return xxh3_64_intdigest(stored.numpy().tobytes())
