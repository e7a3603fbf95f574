"""Coverings: of all combinations of some settings, few in which every pair of values is met.

    @pytest.mark.parametrize(("sharding", "remat", "sequence"), pairwise(SHARDINGS, REMATS, (False, True)))

This is what a matrix of a proof is made of unless a reason is given; the whole product is for `make prove-big`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from heapq import heapify, heapreplace
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
    # Of a case there is never more to be met than there was: what was counted before is a bound, and few are counted.
    bounds = [(-len(met[place]), -len(case), cost(place), place) for place, case in enumerate(cases)]
    heapify(bounds)
    while missing:
        _, _, price, place = bounds[0]
        known = (-len(met[place] & missing), -len(new.intersection(enumerate(cases[place]))), price, place)
        if heapreplace(bounds, known) < known:
            continue
        found.append(place)
        missing -= met[place]
        new.difference_update(enumerate(cases[place]))
    return found


def pairwise(*axes: Iterable[Any], legal: Callable[..., bool] = lambda *case: True) -> list[tuple[Any, ...]]:
    """Of the ``legal`` cases of the product of ``axes``, some in which every two values of two axes come together that
    come together in any."""
    cases = [case for case in product(*(tuple(axis) for axis in axes)) if legal(*case)]
    return [cases[place] for place in covering(cases)]
