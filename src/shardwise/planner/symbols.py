"""Reads the sizes of a unit that was traced on primes as products of symbols: ``2*K*e``, ``b*s*d/64``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from shardwise.spec.sheet import Dim
from shardwise.techniques.variant import Variant

LARGEST_COEFFICIENT = 64
"""The largest factor of a size that no symbol explains: numbers of a program's own are small. What divides must be a
power of two."""


@dataclass(frozen=True)
class Symbols:
    """``atoms``: the number that stands for each symbol, in the order in which they are looked for; ``rules``: symbols
    that together are another. ``own``: sizes are the model's own, and whatever is left of one is its coefficient."""

    atoms: tuple[tuple[str, int], ...]
    rules: tuple[tuple[tuple[str, ...], str], ...] = ()
    own: bool = False

    @classmethod
    def of(cls, variant: Variant, sums: Mapping[str, int]) -> Symbols:
        """Return the symbols of a variant, whose ``sums`` came to these numbers. The largest is looked for first: a
        smaller one may happen to divide it."""
        largest_first = sorted(sums.items(), key=lambda each: -each[1])
        return cls((*largest_first, *variant.atoms), variant.rules, own=variant.concrete or not variant.atoms)

    @cached_property
    def _known(self) -> dict[int, Dim]:
        return {}

    def __call__(self, size: int) -> Dim:
        """The product that ``size`` is. Raises ValueError for what is none."""
        if size not in self._known:
            self._known[size] = self._read(size)
        return self._known[size]

    def _read(self, size: int) -> Dim:
        left, found = Fraction(size), list[str]()
        for symbol, number in self.atoms:
            odd = number // (number & -number)  # half a head is e/2
            while odd > 1 and left and left.numerator % odd == 0:
                left /= number
                found.append(symbol)
        for parts, name in self.rules:
            while all(part in found for part in parts):
                for part in parts:
                    found.remove(part)
                found.append(name)
        power = left.denominator & (left.denominator - 1) == 0
        if not self.own and (left.numerator > LARGEST_COEFFICIENT or not power):
            raise ValueError(f"a size of {size} is no product of the symbols of a sheet: {left} times {found}")
        if not found:
            return left.numerator
        factors = [str(left.numerator)] if left.numerator != 1 else []
        return "*".join([*factors, *sorted(found)]) + (f"/{left.denominator}" if left.denominator > 1 else "")

    def shape(self, sizes: tuple[int, ...]) -> tuple[Dim, ...]:
        """As dims of which each is b, s or b*s, or has neither; one that has both is two."""
        found: list[Dim] = []
        for dim in map(self, sizes):
            above, bar, below = str(dim).partition("/")
            grown = "*".join(symbol for symbol in above.split("*") if symbol in ("b", "s"))
            if grown not in ("", "b", "s", "b*s"):
                raise ValueError(f"a dim of {dim} grows with the batch in a way that a sheet cannot say")
            kept = [symbol for symbol in above.split("*") if symbol not in ("b", "s")]
            found += [grown] if grown else []
            found += [_whole("*".join(kept) + bar + below)] if kept else []
        return tuple(found)


def _whole(dim: str) -> Dim:
    return int(dim) if dim.isdigit() else dim
