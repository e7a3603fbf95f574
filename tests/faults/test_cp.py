"""Kills where ranks share rows, beside zero3: two rings of two ranks."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from tests.faults.conftest import Make
from tests.faults.job import KILL, SAVE, STEPS, Job

pytestmark = pytest.mark.timeout(400)
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def undisturbed(make: Make) -> Job:
    job = make("cp-whole", strategy="cp-zero3", world=4)
    assert job.train(job.write()) == [0] * 4, job.log.read_text()[-3000:]
    assert job.saved() == [10, STEPS]
    return job


@pytest.mark.rare(2)
@pytest.mark.parametrize(("phase", "rank"), [("forward", 3), ("backward", 0), ("count", 1)])
def test_a_rank_killed_in_any_phase_of_a_step(make: Make, undisturbed: Job, phase: str, rank: int) -> None:
    """While it computes, the other of its ring waits for its keys, and the rest for its gradients."""
    job = make(f"cp-{phase}-{rank}", strategy="cp-zero3", world=4)
    words = job.write()
    codes = job.train(words, {rank: f"{phase}:{KILL}:{rank}"})
    assert job.fired(f"{phase}-{KILL}-{rank}")
    assert codes == [KILLED if other == rank else 1 for other in range(4)]
    assert job.saved() == [SAVE]
    assert job.train(words) == [0] * 4
    assert job.begun_at() == [0, SAVE]
    job.same_as(undisturbed)


@pytest.mark.prove
def test_a_rank_killed_while_it_saves(make: Make, undisturbed: Job) -> None:
    """The second checkpoint is not there, and the first one serves."""
    job = make("cp-save", strategy="cp-zero3", world=4)
    words = job.write(checkpoint={"asynchronous": True})
    codes = job.train(words, sabotage=("kill_in_save", 3, 2 * SAVE, "torn"))
    assert job.fired("save-torn") and codes == [1, 1, 1, KILLED]
    assert job.saved() == [SAVE]
    assert job.train(words) == [0] * 4
    assert job.begun_at() == [0, SAVE]
    job.same_as(undisturbed)


@pytest.mark.prove
def test_it_goes_on_with_whole_rows(make: Make, whole: Job) -> None:
    """And computes what the run of two ranks did: losses within 1e-6 relative, in fp32."""
    four = make("cp-resized", strategy="cp-zero3", world=4)
    assert four.train(four.write(), {rank: f"count:{KILL}:{rank}" for rank in range(4)}) == [KILLED] * 4
    two = replace(four, strategy="zero1", world=2)
    assert two.train(two.write()) == [0, 0]
    assert two.begun_at() == [0, SAVE]
    for mine, theirs in zip(two.numbers(), whole.numbers(), strict=True):
        assert mine[2] == pytest.approx(theirs[2], rel=1e-6)
        assert mine[3] == pytest.approx(theirs[3], rel=1e-5)
