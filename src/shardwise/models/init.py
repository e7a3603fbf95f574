"""Initial weights that do not depend on the layout: a rank draws only the blocks of random numbers that overlap its
slice."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from shardwise.models.config import ModelSpec
from shardwise.models.roles import is_adapter, role

ALGORITHM = "shardwise-init-1"
"""Part of every key: if the algorithm changes, so must this name and the golden vectors in the tests."""

BLOCK = 2**20
FORGETTING = 15.99
"""How far the largest ``exp(decay_log)`` is from the smallest, at first."""

Draw = Callable[[str, Sequence[int], Sequence[slice], int, ModelSpec], Tensor]
"""A function such as :func:`fill`."""


def fill(name: str, shape: Sequence[int], part: Sequence[slice], seed: int, spec: ModelSpec) -> Tensor:
    """The slice ``part`` (start and stop for each dim, no step) of the initial value of a parameter, in fp32.

    ``name`` is canonical and ``shape`` global. Matrices are normal(0, initializer_range), norms one (zero where one is
    added), biases and corrections zero; of an adapter, A is normal with the variance that PEFT's uniform values have,
    1 / (3 in), and B zero; a magnitude follows from its weight (runtime/build.py). What heads of a gated delta net
    forget in a token is exp(-exp(decay_log) * 1.3) at first, of exp(decay_log) even between 0 and 16. A model of
    transformers' own modules begins as transformers begins it.
    """
    local = [p.stop - p.start for p in part]
    kind = role(name)
    if spec.hf_model is not None and not is_adapter(name):
        mean, deviation = spec.hf_model.drawn(name)
        return (normal(name, shape, part, seed).mul_(deviation) if deviation else torch.zeros(local)) + mean
    if kind in ("norm", "bias", "lora_b", "lora_m", "correction", "dt_bias"):
        one = kind == "dt_bias" or (kind == "norm" and not (spec.norm_plus_one and ".head_norm." not in name))
        return torch.full(local, 1.0 if one else 0.0)
    if kind == "decay_log":
        return torch.special.ndtr(normal(name, shape, part, seed)).mul_(FORGETTING).add_(0.01).log_()
    deviation = (3 * shape[1]) ** -0.5 if kind == "lora_a" else spec.initializer_range
    return normal(name, shape, part, seed).mul_(deviation)


def normal(name: str, shape: Sequence[int], part: Sequence[slice], seed: int) -> Tensor:
    """The values of ``part``, standard normal."""
    local = [p.stop - p.start for p in part]
    out = torch.empty(prod(local))
    if not out.numel():
        return out.view(local)
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(p.start * stride for p, stride in zip(part, strides, strict=True))
    last = sum((p.stop - 1) * stride for p, stride in zip(part, strides, strict=True))
    for block in range(first // BLOCK, last // BLOCK + 1):
        start, stop = block * BLOCK, min((block + 1) * BLOCK, prod(shape))
        if last - first + 1 == out.numel():
            low, high = max(start, first), min(stop, last + 1)
            out[low - first : high - first] = _draw(name, block, stop - start, seed)[low - start : high - start]
            continue
        inside, place = _places(start, stop, shape, part)
        if place.numel():
            out[place] = _draw(name, block, stop - start, seed)[inside]
    return out.view(local)


def _places(start: int, stop: int, shape: Sequence[int], part: Sequence[slice]) -> tuple[Tensor, Tensor]:
    """Return which of the global elements start..stop lie in ``part``, as a mask, and where in it those belong."""
    rest = torch.arange(start, stop)
    inside = torch.ones(stop - start, dtype=torch.bool)
    place = torch.zeros(stop - start, dtype=torch.int64)
    for dim, p in enumerate(part):
        stride = prod(shape[dim + 1 :])
        index = rest // stride
        rest = rest % stride
        inside &= (index >= p.start) & (index < p.stop)
        place = place * (p.stop - p.start) + (index - p.start)
    return inside, place[inside]


def _draw(name: str, block: int, length: int, seed: int) -> Tensor:
    key = hashlib.blake2b(f"{ALGORITHM}/{seed}/{name}/{block}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little", signed=True))
    return torch.empty(length).normal_(generator=generator)
