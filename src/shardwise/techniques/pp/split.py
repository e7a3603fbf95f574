"""The cut of a model into stages: of whole blocks, so that the slowest stage is as fast as it can be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod

from shardwise.models.config import ModelSpec, layer_kinds, parameter_shapes
from shardwise.models.mixers import mixer_of
from shardwise.models.roles import is_linear


@lru_cache(maxsize=64)
def work(spec: ModelSpec, seq_len: int) -> tuple[tuple[int, ...], int]:
    """Return the floating-point operations a token of the forward pass of each block, and of the output layer: of its
    products, twice where a block predicts a further token, and of attention over half a causal sequence, or a
    window."""
    kinds, order = layer_kinds(spec)
    each = [0] * spec.num_hidden_layers
    for name, shape in parameter_shapes(spec).items():
        if is_linear(name):
            each[int(name.split(".")[1])] += 2 * prod(shape)
    for block, kind in enumerate(order):
        seen = min(kinds[kind].window or seq_len, (seq_len + 1) // 2)
        mixer = mixer_of(spec, block)
        each[block] += 2 * (seen * mixer.scores(spec) + mixer.state(spec))
    return tuple(each), 2 * spec.hidden_size * spec.vocab_size * (1 + spec.predictors)


@lru_cache(maxsize=256)
def split(spec: ModelSpec, seq_len: int, stages: int) -> tuple[int, ...]:
    """Return how many blocks each of so many stages has, the output layer weighed in with the last: so that the largest
    stage does as little as it can, and the others are as even as that allows. Raises ValueError for more stages than
    blocks."""
    blocks, head = work(spec, seq_len)
    if stages > len(blocks):
        raise ValueError(f"{len(blocks)} blocks cannot be cut into {stages} stages")
    most = _smallest_largest(blocks, head, stages)
    before = list(accumulate(blocks, initial=0))
    # best[n]: of the first n blocks cut into the stages so far, the least sum of squares, and where each begins.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(stages):
        more = head if stage == stages - 1 else 0
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (squares, cuts) in best.items():
            for stop in range(start + 1, len(blocks) - (stages - 1 - stage) + 1):
                load = before[stop] - before[start] + more
                if load > most:
                    break
                candidate = squares + load * load, (*cuts, stop - start)
                if stop not in found or candidate < found[stop]:
                    found[stop] = candidate
        best = found
    return best[len(blocks)][1]


def _smallest_largest(blocks: Sequence[int], head: int, stages: int) -> int:
    """Return the least that the largest of so many stages can do."""
    low, high = max(*blocks, blocks[-1] + head), sum(blocks) + head
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(blocks, head, middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def _stages_needed(blocks: Sequence[int], head: int, most: int) -> int:
    """Return how many stages there must be where none does more than ``most``."""
    count, load = 1, 0
    for size in (*blocks[:-1], blocks[-1] + head):
        if load + size > most:
            count, load = count + 1, 0
        load += size
    return count
