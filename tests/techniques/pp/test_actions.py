"""The lists of a pipeline: complete, in torch's orders, and with sends and receives that fit."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import Any

import pytest

from shardwise.techniques.pp.actions import (
    SCHEDULES,
    Action,
    Illegal,
    Lists,
    actions,
    forward_actions,
    illegal,
    rank_of,
)
from tests.said import shows
from tests.techniques.pp.held import held
from tests.techniques.pp.replays import replay

STAGES_PER_RANK = {
    "gpipe": (1,),
    "1f1b": (1,),
    "interleaved": (2, 3),
    "interleaved_zb": (1, 2, 3),
    "zbv": (2,),
    "dualpipev": (2,),
    "looped_bfs": (2, 3),
}
SHAPES = [(schedule, count) for schedule, counts in STAGES_PER_RANK.items() for count in counts]


def micro_batches(schedule: str, ranks: int) -> set[int]:
    """The least, those next to it, multiples of the ranks, and what no multiple is near."""
    least = SCHEDULES[schedule].least_micro_batches(ranks)
    return {least, least + 1, 2 * ranks - 1, 2 * ranks, 3 * ranks + 1} - set(range(least))


def computations(order: tuple[Action, ...]) -> list[str]:
    return [str(action) for action in order if action.computes]


def letters(lists: Lists) -> dict[tuple[int, int, int], str]:
    """By (rank, stage, micro-batch), what is computed of it, in order."""
    found = defaultdict[tuple[int, int, int], str](str)
    for rank, order in enumerate(lists):
        for action in order:
            if action.computes:
                found[rank, action.stage, action.micro] += action.kind
    return found


@pytest.mark.parametrize(("schedule", "count"), SHAPES)
def test_each_stage_computes_each_micro_batch_once_on_its_rank(schedule: str, count: int) -> None:
    parts = {"FB", "FIW"} if SCHEDULES[schedule].splits_backward else {"FB"}
    for ranks in (2, 3, 4, 8):
        for many in micro_batches(schedule, ranks):
            found = letters(actions(schedule, ranks, count, many))
            stages = range(ranks * count)
            assert set(found) == {(rank_of(schedule, s, ranks), s, m) for s in stages for m in range(many)}
            assert set(found.values()) <= parts
            assert {found[0, 0, micro] for micro in range(many)} == {"FB"}  # its input needs no gradient


def test_the_ranks_of_stages() -> None:
    assert [rank_of("interleaved", stage, 3) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [rank_of("zbv", stage, 3) for stage in range(6)] == [0, 1, 2, 2, 1, 0]


def test_a_list_that_a_person_can_follow() -> None:
    first, second = actions("1f1b", 2, 1, 2)
    assert computations(first) == ["0F0", "0F1", "0B0", "0B1"]
    assert list(map(str, second)) == [
        *("1RECV_F0", "1F0", "1RECV_F1", "1B0", "1SEND_B0"),
        *("1F1", "1B1", "1SEND_B1"),
    ]


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        ((True, True, True, True), ["FB", "FIW", "FIW", "FIW"]),
        ((False, True, True, True), ["F", "FB", "FIW", "FIW"]),
        ((False, False, True, True), ["F", "F", "FB", "FIW"]),
        ((True, False, True, True), ["FB", "FI", "FIW", "FIW"]),
        ((False, False, True, False), ["F", "F", "FB", "FI"]),
        ((False, False, False, False), ["F", "F", "F", "F"]),
    ],
)
@pytest.mark.parametrize("schedule", ["interleaved_zb", "zbv"])
def test_backward_is_only_of_what_is_trained(schedule: str, trained: tuple[bool, ...], expected: list[str]) -> None:
    lists = actions(schedule, 2, 2, 4, trained)
    found = {(stage, micro): done for (_, stage, micro), done in letters(lists).items()}
    assert [found[stage, 3] for stage in range(4)] == expected
    sends = {action.stage for order in lists for action in order if action.kind == "SEND_B"}
    assert not sends & set(range(trained.index(True) + 1 if True in trained else 4))


def test_trained_is_of_every_stage() -> None:
    with pytest.raises(ValueError, match=r"3 stages.* 4"):
        actions("zbv", 2, 2, 4, (True, True, False))


@pytest.mark.parametrize(("schedule", "count"), SHAPES)
def test_both_sides_of_every_channel_have_one_order(schedule: str, count: int) -> None:
    for ranks, many in ((2, 8), (3, 8), (4, 8), (5, 11), (8, 17)):
        sent, received = defaultdict[tuple[int, int], list[Any]](list), defaultdict[tuple[int, int], list[Any]](list)
        for rank, order in enumerate(actions(schedule, ranks, count, many)):
            for action in order:
                if action.kind in ("SEND_F", "SEND_B"):
                    sent[rank, action.peer].append(action.gives)
                elif not action.computes:
                    received[action.peer, rank].append(action.takes)
        assert sent == received


def patterns(stages: int) -> list[tuple[bool, ...]]:
    """All trained; some leading stages frozen; one in the middle; both; the last alone trained."""
    middle = tuple(stage != stages // 2 for stage in range(stages))
    leading = tuple(stage >= stages // 3 + 1 for stage in range(stages))
    both = tuple(one and other for one, other in zip(middle, leading, strict=True))
    return [(), leading, middle, both, tuple(stage == stages - 1 for stage in range(stages))]


@pytest.mark.parametrize(("schedule", "count"), SHAPES)
def test_ranks_never_wait_for_ever_and_post_few_receives(schedule: str, count: int) -> None:
    """Where two ranks have rounds of two sizes, a frozen stage has one receive more posted early."""
    for ranks in range(2, 9):
        cases = list(product(sorted(micro_batches(schedule, ranks)), patterns(ranks * count)))
        for many, trained in cases if ranks < 5 else cases[ranks % 3 :: 3]:
            lists = actions(schedule, ranks, count, many, trained)
            replay(lists, lambda _: 1.0, transfer_s=0.7)
            uneven = schedule == "interleaved_zb" and ranks == 2 and many % 2 and trained
            assert max(held(lists).buffers) <= (4 if uneven else 3), (ranks, many, trained)


def test_the_first_stage_that_is_trained_is_not_held_up_by_weights() -> None:
    """Its whole backward stands where I would: 1F1B's order on a rank whose W would lag."""
    lists = actions("interleaved_zb", 4, 1, 8, (False, False, True, True))
    assert computations(lists[2]) == computations(actions("1f1b", 4, 1, 8)[2])


@pytest.mark.parametrize(("schedule", "count"), SHAPES)
def test_an_evaluation_is_forward_alone_of_any_number(schedule: str, count: int) -> None:
    for ranks, many in ((2, 1), (3, 7), (4, 3), (4, 8), (8, 5)):
        lists = forward_actions(schedule, ranks, count, many)
        found = letters(lists)
        assert set(found.values()) == {"F"} and len(found) == ranks * count * many
        replay(lists, lambda _: 1.0, 0.5)
        assert max(held(lists).alive) == 0 and max(held(lists).buffers) <= 3


def test_no_micro_batch_is_nothing_to_do() -> None:
    assert forward_actions("zbv", 2, 2, 0) == ((), ())


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (("gpipe", 4, 1, 1), []),
        (("gpipe", 4, 1, 0), [("micro_batches", 1)]),
        (("gpipe", 4, 2, 8), [("stages_per_rank", 1)]),
        (("1f1b", 4, 1, 3), [("micro_batches", 4)]),
        (("interleaved", 4, 1, 4), [("stages_per_rank", 2)]),
        (("interleaved", 4, 7, 4), []),
        (("interleaved_zb", 4, 0, 4), [("stages_per_rank", 1)]),
        (("zbv", 4, 3, 2), [("stages_per_rank", 2), ("micro_batches", 4)]),
        (("dualpipev", 4, 2, 7), [("micro_batches", 8)]),
        (("dualpipev", 4, 2, 8), []),
    ],
)
def test_the_nearest_legal_numbers(numbers: tuple[str, int, int, int], expected: list[tuple[str, int]]) -> None:
    found = illegal(*numbers)
    assert [(one.name, one.nearest) for one in found] == expected
    schedule, ranks, count, many = numbers
    mended = {"stages_per_rank": count, "micro_batches": many} | dict(expected)
    assert not illegal(schedule, ranks, **mended)
    actions(schedule, ranks, **mended)


def test_illegal_numbers_are_refused_with_what_would_be_legal() -> None:
    [wrong] = illegal("zbv", 4, 2, 2)
    words = wrong.what
    assert wrong == Illegal("micro_batches", words, 4)
    assert shows(words, "zbv", "4 ranks", "4 micro-batches", 2)
    with pytest.raises(ValueError, match=rf"{words} \(nearest: micro_batches 4\)"):
        actions("zbv", 4, 2, 2)
    with pytest.raises(ValueError, match=r"interleaved .*2 .* 1 \(nearest: stages_per"):
        forward_actions("interleaved", 4, 1, 2)


def torch_order(schedule: str, rank: int, ranks: int, count: int, many: int) -> list[str]:
    """What torch's own schedule computes on a rank. Its first stage does nothing in I and its whole backward in the W
    that follows: one B here. Its breadth-first backward begins with the last micro-batch. GPipe and 1F1B are what their
    runtime does, with stages that only take notes, as the drawing of 1F1B numbers the last rank's forwards from 1."""
    if schedule in ("gpipe", "1f1b"):
        return torch_runtime_order(schedule, rank, ranks, many)
    from torch.distributed.pipelining import schedules

    names = {
        "interleaved": "ScheduleInterleaved1F1B",
        "interleaved_zb": "ScheduleInterleavedZeroBubble",
        "zbv": "ScheduleZBVZeroBubble",
        "dualpipev": "ScheduleDualPipeV",
        "looped_bfs": "ScheduleLoopedBFS",
    }
    kind = getattr(schedules, names[schedule])
    made = kind.__new__(kind)
    made.pp_group_size, made.n_local_stages, made._n_microbatches = ranks, count, many
    made._stages = [None] * count
    made._num_stages = made.num_stages = ranks * count
    made.number_of_rounds = max(1, many // ranks)
    made.microbatches_per_round = many // made.number_of_rounds
    found = []
    for action in made._calculate_single_rank_operations(rank):
        for part in () if action is None else action.sub_actions or (action,):
            letter, stage, micro = part.computation_type.value, part.stage_index, part.microbatch_index
            micro = many - 1 - micro if (schedule, letter) == ("looped_bfs", "B") else micro
            if (letter, stage) != ("I", 0):
                found.append(f"{stage}{'B' if (letter, stage) == ('W', 0) else letter}{micro}")
    return found


def torch_runtime_order(schedule: str, rank: int, ranks: int, many: int) -> list[str]:
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    found = []

    class Notes:
        is_last, stage_index = False, rank
        perform_reduce_grad = staticmethod(lambda _: None)
        get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = staticmethod(lambda _: [])

        def forward_one_chunk(self, micro: int, *_: object, **__: object) -> None:
            found.append(f"{rank}F{micro}")

        def backward_one_chunk(self, micro: int, **_: object) -> None:
            found.append(f"{rank}B{micro}")

    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
    made: Any = kind.__new__(kind)
    made._stage, made._num_stages, made._n_microbatches, made.scale_grads = Notes(), ranks, many, False
    made._internal_losses, made._loss_fn, made._initialize_stage = [], None, lambda *_: None
    made._step_microbatches()
    return found


@pytest.mark.parametrize(("schedule", "count"), SHAPES)
def test_computations_are_in_the_order_of_torch(schedule: str, count: int) -> None:
    compared = 0
    for ranks in (2, 3, 4, 8):
        for many in micro_batches(schedule, ranks):
            if schedule.startswith("interleaved") and many % max(1, many // ranks):
                continue  # torch wants rounds of one size
            for rank, order in enumerate(actions(schedule, ranks, count, many)):
                assert computations(order) == torch_order(schedule, rank, ranks, count, many), (ranks, many)
                compared += 1
    assert compared >= 40
