"""Reads the sizes of a unit that was traced on primes as products of symbols, and tells from them which tensors stand
inside attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwise.planner.features import PRIMES
from shardwise.spec.sheet import SYMBOLS, Dim, Op, Tensor, Unit

LARGEST_COEFFICIENT = 16
"""What is left of a size that a program explains; its own numbers are small."""
FACTORS = {symbol: PRIMES[symbol] // (2 if symbol == "e" else 1) for symbol in SYMBOLS if symbol in PRIMES}
INNER = frozenset("KGefp")
"""What only tensors inside attention and MLP are sized by."""


def named(size: int, factors: Mapping[str, int] = FACTORS) -> Dim:
    """``2*K*e`` for the product of 2 and the primes that stand for K and e. Raises ValueError for what is no such
    product."""
    found, left = [], size
    for symbol, prime in factors.items():
        while left and left % prime == 0:
            left //= prime
            found.append(symbol)
    if left > LARGEST_COEFFICIENT:
        raise ValueError(f"a size of {size} is no product of the symbols of a sheet")
    while left % 2 ** found.count("e"):  # half a head: the pairs of one that is rotated whole
        found[found.index("e")] = "p"
    left //= 2 ** found.count("e")
    return "*".join([*([str(left)] if left != 1 else []), *found]) if found else left


def symbolic(unit: Unit) -> Unit:
    """The unit with symbols in the place of primes."""
    unit = renumbered(unit, FACTORS)
    inside = _inside(unit, list(unit.tensors))
    return replace(
        unit, tensors=tuple(replace(t, inside=True) if i in inside else t for i, t in enumerate(unit.tensors))
    )


def renumbered(unit: Unit, factors: Mapping[str, int]) -> Unit:
    """The unit with symbols in the place of the primes that ``factors`` has for them."""

    def symbols(tensor: Tensor) -> Tensor:
        shape = tuple(dim if isinstance(dim, str) else named(dim, factors) for dim in tensor.shape)
        return replace(tensor, shape=shape, symbols=shape)

    def priced(op: Op) -> Op:
        return replace(op, flops=0, symbols=str(named(op.flops, factors))) if op.flops else op

    weights, tensors = (tuple(map(symbols, each)) for each in (unit.weights, unit.tensors))
    passes = (unit.forward, unit.forward_plain, unit.backward)
    forward, plain, backward = (tuple(map(priced, ops)) for ops in passes)
    changed = replace(unit, weights=weights, tensors=tensors)
    return replace(changed, forward=forward, forward_plain=plain, backward=backward)


def _inside(unit: Unit, tensors: list[Tensor]) -> set[int]:
    """Tensors with a place for every token that are not of the residual stream: those sized by heads or by the MLP's
    width, what is made from one of them (a row product's result, the gradient of a column product's input, statistics
    of a norm over the whole projection), and sums of such gradients."""

    def inner(index: int) -> bool:
        return any(isinstance(dim, str) and not INNER.isdisjoint(dim.split("*")) for dim in tensors[index].shape)

    def tokens(index: int) -> bool:
        return any(isinstance(dim, str) and not {"b", "s"}.isdisjoint(dim.split("*")) for dim in tensors[index].shape)

    found: set[int] = set()
    for ops in (unit.forward, unit.backward):
        for op in ops:
            summed = op.name == "aten.add.Tensor" and found.issuperset(op.reads)
            made_inside = summed or any(inner(index) and tokens(index) for index in op.reads)
            found |= {i for i in op.allocates if tokens(i) and (inner(i) or made_inside)}
    return found
