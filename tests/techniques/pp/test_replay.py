"""The replay of a pipeline: closed forms of its bubbles and of what is alive, and lists that are wrong."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.techniques.pp.actions import SCHEDULES, Action, Lists, actions
from shardwise.techniques.pp.replay import Replay
from tests.techniques.pp.held import held
from tests.techniques.pp.replays import replay

SCHEDULED = [
    *(("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)),
    *(("interleaved_zb", 1), ("interleaved_zb", 2), ("zbv", 2), ("dualpipev", 2), ("looped_bfs", 2)),
]


def even(schedule: str, ranks: int, count: int, many: int) -> tuple[Lists, Replay]:
    """F, I and W of a rank's layers take one second each, and transfers none."""
    lists = actions(schedule, ranks, count, many)
    return lists, replay(lists, lambda action: (2 if action.kind == "B" else 1) / count)


@pytest.mark.parametrize(("schedule", "count"), SCHEDULED)
@pytest.mark.parametrize(("ranks", "many"), [(2, 8), (4, 8), (4, 16), (8, 16), (6, 18)])
def test_idle_seconds_have_their_closed_form(schedule: str, count: int, ranks: int, many: int) -> None:
    """p - 1 times F + B of a stage (Narayanan et al., section 2.2), or with a split backward F + I - W (Qi et al.,
    section 2). A stage is one of ``count`` of its rank."""
    parts = 3 if SCHEDULES[schedule].splits_backward else 1
    _, done = even(schedule, ranks, count, many)
    expected_s = 3 * (ranks - 1) / (parts * count)
    assert done.idle_s == pytest.approx([expected_s] * ranks)
    assert done.busy_s == pytest.approx([3.0 * many] * ranks)
    assert done.makespan_s == pytest.approx(3 * many + expected_s)
    assert done.bubble == pytest.approx(expected_s / done.makespan_s)
    assert done.idle_shares == pytest.approx([done.bubble] * ranks)


@pytest.mark.parametrize(("ranks", "many"), [(2, 8), (4, 8), (4, 16), (8, 16)])
def test_what_is_alive_has_its_closed_form(ranks: int, many: int) -> None:
    after = [ranks - 1 - rank for rank in range(ranks)]
    alive = {
        ("gpipe", 1): [many] * ranks,
        ("1f1b", 1): [1 + hops for hops in after],
        ("interleaved", 2): [ranks + 2 * hops + 1 for hops in after],
        ("interleaved", 4): [3 * ranks + 2 * hops + 1 for hops in after],
        ("interleaved_zb", 1): [ranks] * ranks,
        ("interleaved_zb", 2): [2 * ranks] * ranks,
        ("zbv", 2): [2 * ranks] * ranks,
        ("dualpipev", 2): [2 * ranks + 1] * ranks,
        ("looped_bfs", 2): [2 * many] * ranks,
    }
    to_input = alive | {
        ("interleaved_zb", 1): [1 + hops for hops in after],
        ("interleaved_zb", 2): [ranks + hops + 1 for hops in after],
    }
    for (schedule, count), expected in alive.items():
        done = held(actions(schedule, ranks, count, many))
        assert list(done.alive) == expected, schedule
        assert list(done.alive_to_input) == to_input[schedule, count], schedule


def test_frozen_stages_hold_nothing() -> None:
    done = held(actions("1f1b", 4, 1, 8, (False, False, True, True)))
    assert done.alive == done.alive_to_input == (0, 0, 2, 1)
    split = held(actions("interleaved_zb", 4, 1, 8, (False, True, False, True)))
    assert split.alive[0] == 0 and split.alive[2] == split.alive_to_input[2]


def test_stages_and_kinds_differ_in_seconds() -> None:
    """One micro-batch goes through a pipeline one computation after another, and a transfer between two ranks."""
    seconds = {"0F0": 1.0, "1F0": 2.0, "2F0": 4.0, "2B0": 8.0, "1B0": 16.0, "0B0": 32.0}
    done = replay(actions("gpipe", 3, 1, 1), lambda action: seconds[str(action)], transfer_s=0.5)
    assert done.makespan_s == 63 + 4 * 0.5
    assert done.busy_s == (33, 18, 12)
    assert done.idle_s == (32, 47, 53)
    assert [(str(one.action), one.start_s, one.end_s) for one in done.computed[1]] == [
        ("1F0", 1.5, 3.5),
        ("1B0", 16.5, 32.5),
    ]


def test_transfers_of_a_channel_go_one_at_a_time() -> None:
    """Four inputs are made a second apart, and each takes three to arrive."""
    done = replay(actions("gpipe", 2, 1, 4), lambda action: 1.0 if action.kind == "F" else 0.0, transfer_s=3.0)
    assert [one.start_s for one in done.computed[1] if one.action.kind == "F"] == [4, 7, 10, 13]


@settings(max_examples=25, deadline=None)
@given(
    case=st.sampled_from(SCHEDULED),
    ranks=st.integers(2, 6),
    more=st.integers(0, 9),
    seconds=st.lists(st.floats(0.1, 3.0), min_size=24, max_size=24),
    transfer_s=st.sampled_from((0.0, 0.3, 2.0)),
)
def test_what_holds_at_any_speed(
    case: tuple[str, int], ranks: int, more: int, seconds: list[float], transfer_s: float
) -> None:
    schedule, count = case
    lists = actions(schedule, ranks, count, SCHEDULES[schedule].least_micro_batches(ranks) + more)

    def time(action: Action) -> float:
        return seconds[action.stage] * (2 if action.kind == "B" else 1)

    done = replay(lists, time, transfer_s)
    ends = {one.action: one.end_s for computed in done.computed for one in computed}
    for computed, order in zip(done.computed, lists, strict=True):
        assert [one.action for one in computed] == [action for action in order if action.computes]
        assert all(one.end_s <= following.start_s for one, following in pairwise(computed))
        for action, start_s, end_s in computed:
            assert end_s - start_s == pytest.approx(time(action))
            if action.kind == "F" and action.stage:
                assert start_s >= ends[action._replace(stage=action.stage - 1)]
    for busy_s, idle_s, order in zip(done.busy_s, done.idle_s, lists, strict=True):
        assert busy_s == pytest.approx(sum(time(action) for action in order if action.computes))
        assert busy_s + idle_s == pytest.approx(done.makespan_s)
    assert done.makespan_s == max(ends.values()) and 0 <= done.bubble < 1
    assert max(held(lists).buffers) <= 3


def changed(lists: Lists, rank: int, order: list[Action]) -> Lists:
    return (*lists[:rank], tuple(order), *lists[rank + 1 :])


def swapped(order: tuple[Action, ...], one: str, other: str) -> list[Action]:
    found, names = list(order), [str(action) for action in order]
    i, j = names.index(one), names.index(other)
    found[i], found[j] = found[j], found[i]
    return found


def test_two_sends_of_virtual_stages_that_change_places_are_found() -> None:
    lists = actions("interleaved", 2, 2, 4)
    faulty = changed(lists, 0, swapped(lists[0], "0SEND_F1", "2SEND_F0"))
    with pytest.raises(ValueError, match=r"rank 0 .*rank 1 .*receive"):
        replay(faulty, lambda _: 1.0)


@pytest.mark.parametrize(("schedule", "count"), SCHEDULED)
def test_any_two_sends_that_change_places_are_found(schedule: str, count: int) -> None:
    lists = actions(schedule, 3, count, 8)
    for rank, order in enumerate(lists):
        for peer in {action.peer for action in order} - {-1}:
            first, second, *_ = [str(a) for a in order if a.peer == peer and a.kind.startswith("SEND")]
            with pytest.raises(ValueError):
                replay(changed(lists, rank, swapped(order, first, second)), lambda _: 1.0)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    lists = actions("1f1b", 2, 1, 2)
    without = [action for action in lists[0] if action.kind != "SEND_F"]
    with pytest.raises(ValueError, match=r"rank 0 .* 0B0; rank 1 .* 1F0"):
        replay(changed(lists, 0, without), lambda _: 1.0)


def test_a_backward_before_its_forward_is_found() -> None:
    lists = actions("1f1b", 2, 1, 2)
    with pytest.raises(ValueError, match="rank 1 waits at 1B0"):
        replay(changed(lists, 1, swapped(lists[1], "1F0", "1B0")), lambda _: 1.0)


def test_a_side_that_is_missing_is_found() -> None:
    lists: Lists = ((Action("F", 0, 0), Action("SEND_F", 0, 0, 1)), ())
    with pytest.raises(ValueError, match=r"rank 1 never .* rank 0"):
        replay(lists, lambda _: 1.0)
    lists = ((Action("F", 0, 0),), (Action("RECV_F", 1, 0, 0),))
    with pytest.raises(ValueError, match=r"rank 0 never .*rank 1"):
        replay(lists, lambda _: 1.0)
