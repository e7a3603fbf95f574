"""Kills under tensor parallelism beside zero3: two groups of two ranks."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from tests.faults.conftest import Make
from tests.faults.job import KILL, SAVE, STEPS, Job

pytestmark = [pytest.mark.prove, pytest.mark.timeout(400)]
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def undisturbed(make: Make) -> Job:
    job = make("tp-whole", strategy="tp-zero3", world=4)
    assert job.train(job.write()) == [0] * 4, job.log.read_text()[-3000:]
    assert job.saved() == [10, STEPS]
    return job


@pytest.mark.parametrize(("phase", "rank"), [("forward", 3), ("backward", 0), ("reduce", 2), ("optimizer", 1)])
def test_a_rank_killed_in_a_phase_of_a_step(make: Make, undisturbed: Job, phase: str, rank: int) -> None:
    job = make(f"tp-{phase}-{rank}", strategy="tp-zero3", world=4)
    words = job.write()
    codes = job.train(words, {rank: f"{phase}:{KILL}:{rank}"})
    assert job.fired(f"{phase}-{KILL}-{rank}")
    assert codes[rank] == KILLED and all(code != 0 for code in codes)
    assert job.saved() == [SAVE]
    assert job.train(words) == [0] * 4
    assert job.begun_at() == [0, SAVE]
    job.same_as(undisturbed)


@pytest.mark.parametrize(("rank", "when", "left"), [(3, "torn", [SAVE]), (0, "named", [SAVE, 2 * SAVE])])
def test_a_rank_killed_while_it_saves(make: Make, undisturbed: Job, rank: int, when: str, left: list[int]) -> None:
    job = make(f"tp-save-{when}", strategy="tp-zero3", world=4)
    words = job.write()
    assert job.train(words, sabotage=("kill_in_save", rank, 2 * SAVE, when))[rank] == KILLED
    assert job.saved() == left
    assert job.train(words) == [0] * 4
    assert job.begun_at() == [0, left[-1]]
    job.same_as(undisturbed)


def test_it_goes_on_without_tensor_parallelism(make: Make, whole: Job) -> None:
    """And computes what the run of two ranks did: losses within 1e-6 relative, in fp32."""
    four = make("tp-resized", strategy="tp-zero3", world=4)
    assert four.train(four.write(), {rank: f"count:{KILL}:{rank}" for rank in range(4)}) == [KILLED] * 4
    two = replace(four, strategy="zero1", world=2)
    assert two.train(two.write()) == [0, 0]
    assert two.begun_at() == [0, SAVE]
    for mine, theirs in zip(two.numbers(), whole.numbers(), strict=True):
        assert mine[2] == pytest.approx(theirs[2], rel=1e-6)
        assert mine[3] == pytest.approx(theirs[3], rel=1e-5)
