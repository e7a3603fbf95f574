"""The order of the samples: sample k of a run is a pure function of (seed, k) and of the number of windows.

A keyed Feistel network permutes the numbers below a power of four; results that are not below n are permuted again
until they are (cycle walking), so it is a bijection on [0, n) for any n, needs no memory and reaches any position at
once. The algorithm is a file format: checkpoints hold nothing but a cursor. ``VERSION`` names it and golden vectors
pin it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

VERSION = 1
_ROUNDS = 8
_LEAST_HALF_BITS = 3  # smaller networks reach too few of the permutations
_MASK = (1 << 64) - 1
Indices = NDArray[np.int64]


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _keys(seed: int, epoch: int, n: int) -> NDArray[np.uint64]:
    """One key a round. Seed, epoch and n are absorbed one after another, so that none can stand for another."""
    state = np.zeros(1, dtype=np.uint64)
    for word in (seed & _MASK, seed >> 64 & _MASK, epoch, n):
        state = _mix(state + np.uint64(0x9E3779B97F4A7C15) + _mix(np.array([word], dtype=np.uint64)))
    return _mix(state + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def permute(positions: Indices, n: int, seed: int, epoch: int) -> Indices:
    """Return the window at each of ``positions`` (each in [0, n)) in the order of ``epoch``: a bijection on [0, n) for
    every n >= 1."""
    if n == 1:
        return np.zeros_like(positions)
    half = np.uint64(max(_LEAST_HALF_BITS, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = _keys(seed, epoch, n)
    value = positions.astype(np.uint64)
    outside = np.ones(value.shape, dtype=bool)
    while outside.any():
        walked = value[outside]
        left, right = walked >> half, walked & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        value[outside] = left << half | right
        outside = value >= np.uint64(n)
    return value.astype(np.int64)


@dataclass(frozen=True)
class Order:
    """The order of ``windows`` windows under ``seed``, epoch after epoch, each epoch in another order."""

    windows: int
    seed: int = 0

    def samples(self, first: int, count: int) -> Indices:
        """The window of each of the samples ``first`` to ``first + count`` of the run."""
        k = np.arange(first, first + count, dtype=np.int64)
        epochs, positions = k // self.windows, k % self.windows
        ids = np.empty_like(k)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            ids[here] = permute(positions[here], self.windows, self.seed, int(epoch))
        return ids
