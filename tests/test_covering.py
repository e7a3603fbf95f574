"""What samples and coverings of a matrix leave in, and what they may not leave out."""

from __future__ import annotations

from itertools import combinations, product

from tests.conftest import sample
from tests.covering import covering, pairwise


def test_every_two_values_meet_in_few_cases() -> None:
    axes = ("abcde", range(4), range(4), (False, True), (False, True))
    found = pairwise(*axes)
    assert len(found) == len(set(found)) <= 1.3 * 5 * 4  # the two longest axes need as many as their product has
    for (i, one), (j, other) in combinations(enumerate(axes), 2):
        assert {(case[i], case[j]) for case in found} == set(product(one, other))


def test_what_is_not_legal_is_left_out_and_nothing_else() -> None:
    found = pairwise("abc", (2, 4), (1, 2), legal=lambda name, world, _: name != "c" or world == 4)
    assert ("c", 2) not in {case[:2] for case in found}
    assert {("c", 4), ("a", 2), ("b", 4)} <= {case[:2] for case in found}
    assert {(name, n) for name, _, n in found} == set(product("abc", (1, 2)))


def test_the_first_cases_meet_every_value() -> None:
    cases = list(product("abc", (1, 2, 3), (False, True)))
    first = [cases[place] for place in covering(cases)[:3]]
    assert [len(set(values)) for values in zip(*first, strict=True)] == [3, 3, 2]


def test_of_cases_that_meet_as_much_the_cheapest_is_taken() -> None:
    assert covering(["ax", "ay"], cost=lambda place: -place) == [1, 0]


def test_of_a_list_without_repeated_values_every_nth_is_sampled() -> None:
    assert sample([(str(n), str(-n)) for n in range(7)], 3) == {0, 3, 6}
    assert len(sample([(a, b) for a in "abc" for b in "xyz"], 3)) == 3
