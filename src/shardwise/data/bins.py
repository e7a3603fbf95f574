"""Packing whole samples into windows: first fit, longest first. A pure function of the lengths."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def pack(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The window of each sample: the first with enough room, taking samples from the longest to the shortest (equal
    lengths in their order). ``lengths`` are 1 to ``capacity``.

    Samples of equal length are placed together: a window with room r takes r // length of them, from the first window
    on. The result is the same as placing them one by one, and a million samples take seconds.
    """
    order = np.argsort(-lengths, kind="stable")
    windows = np.empty(len(lengths), dtype=np.int64)
    room = np.zeros(0, dtype=np.int64)
    numbers = np.zeros(0, dtype=np.int64)
    made = 0
    least = int(lengths.min(initial=capacity))
    values, counts = np.unique(-lengths, return_counts=True)
    first = 0
    for length, count in zip((-values).tolist(), counts.tolist(), strict=True):
        takes = np.minimum(room // length, count)
        before = np.cumsum(takes) - takes
        takes = np.clip(count - before, 0, takes)
        room -= takes * length
        placed = np.repeat(numbers, takes)
        each = capacity // length
        fresh = -(-(count - len(placed)) // each)
        new = np.repeat(np.arange(made, made + fresh), each)[: count - len(placed)]
        windows[order[first : first + count]] = np.concatenate([placed, new])
        first += count
        left = np.full(fresh, capacity - each * length, dtype=np.int64)
        if fresh:
            left[-1] = capacity - (len(new) - each * (fresh - 1)) * length
        room, numbers = np.concatenate([room, left]), np.concatenate([numbers, np.arange(made, made + fresh)])
        made += fresh
        open_ = room >= least
        room, numbers = room[open_], numbers[open_]
    return windows
