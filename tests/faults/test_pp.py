"""Kills and a hang in a pipeline beside zero1: two stages of two ranks."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from shardwise.runtime.faults.heartbeat import RankStatus, culprit, hang
from tests.faults.conftest import Make
from tests.faults.job import KILL, SAVE, STEPS, Job

pytestmark = pytest.mark.timeout(400)
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def undisturbed(make: Make) -> Job:
    job = make("pp-whole", strategy="pp-zero1", world=4)
    assert job.train(job.write()) == [0] * 4, job.log.read_text()[-3000:]
    assert job.saved() == [10, STEPS]
    return job


@pytest.mark.rare(2)
@pytest.mark.parametrize(("phase", "rank"), [("forward", 3), ("backward", 0), ("optimizer", 1)])
def test_a_rank_killed_in_any_phase_of_a_step(make: Make, undisturbed: Job, phase: str, rank: int) -> None:
    job = make(f"pp-{phase}-{rank}", strategy="pp-zero1", world=4)
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
    job = make("pp-save", strategy="pp-zero1", world=4)
    words = job.write(checkpoint={"asynchronous": True})
    codes = job.train(words, sabotage=("kill_in_save", 3, 2 * SAVE, "torn"))
    assert job.fired("save-torn") and codes == [1, 1, 1, KILLED]
    assert job.saved() == [SAVE]
    assert job.train(words) == [0] * 4
    assert job.begun_at() == [0, SAVE]
    job.same_as(undisturbed)


@pytest.mark.prove
def test_it_goes_on_without_a_pipeline(make: Make, whole: Job) -> None:
    """And computes what the run of two ranks did: losses within 1e-6 relative, in fp32."""
    four = make("pp-resized", strategy="pp-zero1", world=4)
    assert four.train(four.write(), {rank: f"count:{KILL}:{rank}" for rank in range(4)}) == [KILLED] * 4
    two = replace(four, strategy="zero1", world=2)
    assert two.train(two.write()) == [0, 0]
    assert two.begun_at() == [0, SAVE]
    for mine, theirs in zip(two.numbers(), whole.numbers(), strict=True):
        assert mine[2] == pytest.approx(theirs[2], rel=1e-6)
        assert mine[3] == pytest.approx(theirs[3], rel=1e-5)


def status(rank: int, phase: str, count: int) -> RankStatus:
    return RankStatus(rank, 1, 3, count, 0.0, 0.0, 0, phase, "", "elsewhere")


def test_the_rank_at_the_end_of_the_chain_is_blamed_and_not_the_one_that_is_furthest_behind(tmp_path: object) -> None:
    """Rank 1 of four hangs. Those after it wait for one another, and have done less."""
    pages = [status(0, "waits 1 0.3", 31), status(1, "forward 1.5", 29), status(2, "waits 1 2.5", 26)]
    pages.append(status(3, "waits 2 3.5", 22))
    late = culprit(pages)
    assert late is not None and late.rank == 1
    problem = hang(pages, 60.0, tmp_path)  # type: ignore[arg-type]
    assert problem is not None and problem.code == "HANG001"
    assert "rank 1" in problem.what and "has sent nothing for 60 s" in problem.what
    assert "rank 2 is waiting for rank 1 (stage 2, micro-batch 5)" in problem.what
    assert "phase forward (stage 1, micro-batch 5)" in problem.where


def test_without_a_pipeline_the_rank_that_is_furthest_behind_is_blamed() -> None:
    late = culprit([status(0, "count", 9), status(1, "forward", 7), status(2, "count", 9)])
    assert late is not None and late.rank == 1
