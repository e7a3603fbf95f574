"""The batch sizes: two given, the third follows; contradictions are told with numbers that work (B-09)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.spec.batch import DEFAULT_GLOBAL, TOKENS_PER_MICRO_BATCH, batch, batch_reasons
from shardwise.spec.recipe import Train
from tests.said import shows


@pytest.mark.parametrize(
    ("micro", "accumulation", "whole", "dp", "expected"),
    [
        (4, 8, None, 8, (4, 8, 256)),
        (4, None, 512, 8, (4, 16, 512)),
        (None, 8, 64, 8, (1, 8, 64)),
        (4, 16, 512, 8, (4, 16, 512)),
        (4, None, None, 8, (4, 1, 32)),
        (None, 2, None, 8, (4, 2, 64)),
        (None, None, 16, 2, (4, 2, 16)),
        (None, None, 64, 16, (4, 1, 64)),
        (None, None, None, 1, (4, 8, 32)),
        (None, None, None, 5, (1, 7, 35)),
    ],
)
def test_sizes(
    micro: int | None, accumulation: int | None, whole: int | None, dp: int, expected: tuple[int, int, int]
) -> None:
    train = Train(micro_batch_size=micro, gradient_accumulation_steps=accumulation, global_batch_size=whole)
    assert batch(train, dp) == expected


@given(
    dp=st.integers(1, 64), seq_len=st.integers(2, 20_000), whole=st.integers(1, 512) | st.none(), micro=st.booleans()
)
def test_sizes_always_multiply(dp: int, seq_len: int, whole: int | None, micro: bool) -> None:
    train = Train(seq_len=seq_len, global_batch_size=whole, micro_batch_size=2 if micro else None)
    try:
        size, accumulation, total = batch(train, dp)
    except ConfigError:
        assert whole is not None and whole % (dp * (2 if micro else 1))
        return
    assert size * accumulation * dp == total
    assert whole is None or total == whole
    assert micro or size == 1 or size * seq_len <= TOKENS_PER_MICRO_BATCH


@pytest.mark.parametrize(
    ("train", "dp", "what", "fix"),
    [
        (
            Train(global_batch_size=512, micro_batch_size=4, gradient_accumulation_steps=8),
            8,
            [512, "micro 4", "accumulation 8", "dp 8", 256],
            ["`train.gradient_accumulation_steps=16`", "`train.global_batch_size=256`"],
        ),
        (
            Train(global_batch_size=10),
            4,
            [10, "dp 4"],
            ["`train.global_batch_size=12`"],
        ),
        (
            Train(global_batch_size=8, micro_batch_size=3),
            2,
            [8, "micro 3", "dp 2", 6],
            ["`train.global_batch_size=12`"],
        ),
    ],
)
def test_contradictions(train: Train, dp: int, what: list[object], fix: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        batch(train, dp)
    (problem,) = caught.value.problems
    assert problem.code == "CFG008" and shows(problem.what, *what) and shows(problem.fix, *fix)
    assert caught.value.exit_code == 78


def test_reasons() -> None:
    reasons = batch_reasons(Train(global_batch_size=64, micro_batch_size=2))
    assert reasons == {
        "batch.micro_batch_size": "pinned",
        "batch.accumulation": "derived from micro_batch_size and global_batch_size",
        "batch.global_batch_size": "pinned",
    }
    assert f"default: {DEFAULT_GLOBAL} sequences" in batch_reasons(Train())["batch.global_batch_size"]
