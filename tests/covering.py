"""Coverings: of all combinations of some settings, few in which every pair of values is met.

    @pytest.mark.parametrize(("dial", "remat", "sequence"), pairwise(DIALS, REMATS, (False, True)))

This is what a matrix of a proof is made of unless a reason is given; the whole product is for `make prove-big`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

Case = Sequence[Hashable]
Pair = tuple[tuple[int, Hashable], ...]


def pairs(case: Case) -> set[Pair]:
    """Its values two by two, each with its place among the others."""
    return set(combinations(enumerate(case), 2))


def covering(cases: Sequence[Case], cost: Callable[[int], float] = lambda place: 0.0) -> list[int]:
    """Places of as few of ``cases`` as meet all pairs that any meets, each next one that with most pairs which none
    before it has, then most such values; of several the cheapest, and of these the first. So the first few meet every
    value."""
    met, found = [pairs(case) for case in cases], []
    missing = set[Pair]().union(*met)
    new = {value for case in cases for value in enumerate(case)}

    def worth(place: int) -> tuple[int, int, float]:
        return len(met[place] & missing), len(new.intersection(enumerate(cases[place]))), -cost(place)

    while missing:
        found.append(max(range(len(cases)), key=worth))
        missing -= met[found[-1]]
        new.difference_update(enumerate(cases[found[-1]]))
    return found


def pairwise(*axes: Iterable[Any], legal: Callable[..., bool] = lambda *case: True) -> list[tuple[Any, ...]]:
    """Of the ``legal`` cases of the product of ``axes``, some in which every two values of two axes come together that
    come together in any."""
    cases = [case for case in product(*(tuple(axis) for axis in axes)) if legal(*case)]
    return [cases[place] for place in covering(cases)]
