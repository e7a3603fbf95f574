"""Which rank is slow: by synthetic times of ranks, and by the clock of a block."""

from __future__ import annotations

import math
import time
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.runtime.metrics.pace import IN_A_ROW, WINDOW, BlockClock, PaceWatch, SlowRank, mean_and_error


def window(
    chance: Random, factors: list[float], scatter: float, pauses: float = 0.05
) -> tuple[list[float], list[float]]:
    """Means and errors of ranks whose passes take a second times these factors, more or less; ``pauses`` of
    them are held up for another."""
    found = [
        mean_and_error([f * chance.lognormvariate(0, scatter) + (chance.random() < pauses) for _ in range(WINDOW)])
        for f in factors
    ]
    return [mean for mean, _ in found], [error for _, error in found]


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("scatter", [0.01, 0.05, 0.3])
def test_no_rank_is_named_of_quiet_ones(ranks: int, scatter: float) -> None:
    """A thousand windows are 7,000 steps."""
    chance, watch = Random(f"{ranks} {scatter}"), PaceWatch([range(ranks)])
    assert [watch.add(n, *window(chance, [1.0] * ranks, scatter)) for n in range(1000)] == [[]] * 1000


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_one_is_named_once_with_its_first_window_until_it_has_kept_up_again(ranks: int, slow: int) -> None:
    chance, watch, found = Random(ranks), PaceWatch([range(ranks)]), []
    for n in range(60):
        factors = [1.5 if rank == slow and n // 10 in (1, 2, 4) else 1.0 for rank in range(ranks)]
        found += [(n, named) for named in watch.add(n, *window(chance, factors, 0.03, 0.0))]
    assert [(n, named.rank, named.since) for n, named in found] == [
        (10 + IN_A_ROW - 1, slow, 10),
        (40 + IN_A_ROW - 1, slow, 40),
    ]
    assert found[0][1].own_s / found[0][1].others_s == pytest.approx(1.5, abs=0.15)


def test_a_tenth_more_is_not_slow_and_less_than_the_errors_is_not_either() -> None:
    for means, errors, named in (
        ([1.0, 1.09], [0.0, 0.0], False),
        ([1.0, 1.12], [0.0, 9.0], True),
        ([1.0, 2.1], [0.2, 0.0], False),
        ([1.0, 2.3], [0.2, 0.0], True),
        ([1.0, math.nan], [0.0, 0.0], False),
    ):
        watch = PaceWatch([range(2)])
        found = [watch.add(n, means, errors) for n in range(IN_A_ROW)]
        assert found == [[], [], [SlowRank(1, 0, means[1], 1.0)] if named else []]


def test_windows_of_which_nothing_is_known_stand_between() -> None:
    """So many in a row are asked for."""
    watch, slow, unknown = PaceWatch([range(2)]), [1.0, 2.0], [1.0, math.nan]
    found = [watch.add(n, means, [0.0, 0.0]) for n, means in enumerate([slow, slow, unknown, slow, slow, slow])]
    assert found == [[]] * 5 + [[SlowRank(1, 3, 2.0, 1.0)]]


def test_ranks_are_compared_with_those_that_do_the_same() -> None:
    watch = PaceWatch([[0, 1], [2, 3]])
    assert [watch.add(n, [1.0, 1.0, 5.0, 5.0], [0.0] * 4) for n in range(IN_A_ROW)] == [[]] * IN_A_ROW


def test_the_longest_passes_do_not_count() -> None:
    assert mean_and_error([1.0, 3.0, 99.0]) == (2.0, 1.0)
    assert mean_and_error([9.0, 1.0, 99.0, 5.0, 99.0]) == (5.0, pytest.approx(4 / math.sqrt(3)))
    assert math.isnan(mean_and_error([1.0, 99.0])[0]) and math.isnan(mean_and_error([])[0])


class Slept(nn.Module):
    def forward(self, seconds: float) -> None:
        time.sleep(seconds)


def test_the_clock_of_a_block_times_its_forward_in_training_alone() -> None:
    block = Slept()
    clock = BlockClock(block, torch.device("cpu"))
    block(0.05)
    time.sleep(0.1)
    with torch.no_grad():
        block(0.0)
    block(0.0)
    long, short = clock.read()
    assert 0.05 <= long < 0.1 and short < 0.05
    assert clock.read() == []


def test_on_a_gpu_the_device_says_how_long_and_what_it_has_not_done_does_not_count() -> None:
    made: list[Any] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            self.timing, self.at = enable_timing, len(made)
            made.append(self)

        def record(self) -> None:
            self.recorded = True

        def query(self) -> bool:
            return self.at < 4

        def elapsed_time(self, end: Any) -> float:
            assert self.timing and end.timing and self.recorded and end.recorded
            return 1000.0 * (end.at - self.at)

    block = Slept()
    clock = BlockClock(block, torch.device("cpu"), type("Events", (), {"Event": Event}))
    for _ in range(3):
        block(0.0)
    assert clock.read() == [1.0, 1.0] and len(made) == 6
