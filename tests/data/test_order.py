"""The order of the samples is a file format: bijective for any n, and fixed by golden vectors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.order import VERSION, Order, permute

MASK = 2**64 - 1


def slow_mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def slow_permute(position: int, n: int, seed: int, epoch: int) -> int:
    """The algorithm again, in whole numbers of Python, one position at a time."""
    if n == 1:
        return 0
    state = 0
    for word in (seed & MASK, seed >> 64 & MASK, epoch, n):
        state = slow_mix((state + 0x9E3779B97F4A7C15 + slow_mix(word)) & MASK)
    keys = [slow_mix((state + r * 0x9E3779B97F4A7C15) & MASK) for r in range(1, 9)]
    half = max(3, ((n - 1).bit_length() + 1) // 2)
    value = position
    while True:
        left, right = value >> half, value & (1 << half) - 1
        for key in keys:
            left, right = right, left ^ slow_mix((right + key) & MASK) & (1 << half) - 1
        value = left << half | right
        if value < n:
            return value


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 10**6))
def test_every_order_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(1, 2**62), seed=st.integers(0, 2**64), epoch=st.integers(0, 10**6))
def test_it_is_the_algorithm_at_any_size(data: st.DataObject, n: int, seed: int, epoch: int) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    got = permute(np.array(positions, dtype=np.int64), n, seed, epoch).tolist()
    assert got == [slow_permute(position, n, seed, epoch) for position in positions]


@pytest.mark.parametrize(
    ("n", "seed", "epoch", "golden"),
    [
        (1, 0, 0, [0]),
        (2, 0, 0, [1, 0]),
        (5, 1, 0, [3, 2, 1, 4, 0]),
        (8, 0, 3, [6, 7, 3, 2, 5, 1, 0, 4]),
        (100, 42, 0, [87, 12, 64, 91, 69, 67, 25, 1]),
        (257, 7, 1, [73, 158, 226, 129, 39, 255, 132, 198]),
        (12227, 0, 0, [3862, 8259, 6616, 625, 6111, 6152, 1480, 4938]),
        (12227, 0, 1, [5864, 5722, 4235, 2920, 7940, 8962, 4302, 4167]),
        (1000000, 123456789, 9, [439513, 608425, 101453, 377990, 137254, 338263, 287500, 56544]),
        (
            1099511627777,
            18446744073709551621,
            2,
            [
                513830724766,
                167674696133,
                333242996181,
                672029492418,
                269429867112,
                87661418107,
                1057711470418,
                965070946334,
            ],
        ),
        (
            4611686018427387904,
            0,
            0,
            [
                4465124878672614904,
                3309290797489429728,
                3872086771842611194,
                2853306551116922591,
                1537133984551687962,
                3044008013323364725,
                845886728666105476,
                2874379177665402851,
            ],
        ),
    ],
)
def test_golden_vectors_of_version_1(n: int, seed: int, epoch: int, golden: list[int]) -> None:
    assert VERSION == 1
    assert permute(np.arange(min(n, 8)), n, seed, epoch).tolist() == golden


def test_every_position_of_a_small_order_is_equally_likely() -> None:
    counts = np.zeros((5, 5), dtype=int)
    for seed in range(500):
        counts[np.arange(5), permute(np.arange(5), 5, seed, 0)] += 1
    # 100 expected with a standard deviation of 9: an even choice stays within five of them.
    assert np.abs(counts - 100).max() < 45


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [permute(np.arange(1000), 1000, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1))]
    for index, first in enumerate(orders):
        for second in orders[index + 1 :]:
            assert (first == second).sum() < 12  # chance: 1 on average


def test_samples_run_through_the_epochs() -> None:
    order = Order(windows=7, seed=3)
    run = order.samples(0, 21)
    for epoch in range(3):
        assert sorted(run[7 * epoch : 7 * epoch + 7].tolist()) == list(range(7))
        assert np.array_equal(run[7 * epoch : 7 * epoch + 7], permute(np.arange(7), 7, 3, epoch))


@given(first=st.integers(0, 10**12), count=st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_sample_k_does_not_depend_on_where_reading_began(first: int, count: int) -> None:
    order = Order(windows=11, seed=5)
    alone = [order.samples(k, 1)[0] for k in range(first, first + count)]
    assert order.samples(first, count).tolist() == alone
