"""Sizes of the gated delta rule: its chunks, the states that it keeps, and what it multiplies. No torch."""

from __future__ import annotations

CHUNK, CHUNKS = 64, 8
"""Tokens of a chunk of heads with whole sizes, and how many chunks backward computes again at a time."""


def kept(key: int, value: int) -> int:
    """Return how many numbers of states are kept for each token and head of values: of a state [key,value] each
    CHUNK * CHUNKS tokens, rounded up."""
    return -(-key * value // (CHUNK * CHUNKS))


def chunk(key: int, value: int) -> int:
    """Return how many tokens a chunk has, so that the states between blocks of ``CHUNKS`` fit into what is kept."""
    return -(-key * value // (CHUNKS * kept(key, value)))


def products(key: int, value: int, each: int, *, backward: bool = False) -> int:
    """Return how many numbers a token multiplies for the ``each`` heads of values that share a key head: forward, or
    backward with what it computes again."""
    tokens, inverse = chunk(key, value), chunk(key, value) ** 2 // 2
    state, within = (8, 5) if backward else (3, 2)
    return each * (state * key * value + within * tokens * value + inverse) + within * tokens * key


def passed(key: int, value: int, each: int, *, backward: bool = False) -> int:
    """Return how many numbers a token multiplies more where states pass between the pieces of a row: for the map of its
    piece from state to state, or backward for the gradient of the state before it."""
    if backward:
        return products(key, value, each)
    tokens, inverse = chunk(key, value), chunk(key, value) ** 2 // 2
    return each * ((2 * key + tokens) * (key + value) + inverse) + 2 * tokens * key
