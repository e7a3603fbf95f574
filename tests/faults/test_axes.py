"""Kills where a rank is not one of many alike: two stages of two ranks beside zero1, two rings of two beside zero3, two
pairs of ranks with different experts beside zero3."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from tests.faults.conftest import Make
from tests.faults.job import KILL, SAVE, STEPS, Job

pytestmark = pytest.mark.timeout(400)
KILLED = -signal.SIGKILL
STRATEGIES = ("pp-zero1", "cp-zero3", "ep-zero3")
PHASES = [(strategy, phase, rank) for strategy in STRATEGIES[:2] for phase, rank in (("forward", 3), ("backward", 0))]
PHASES += [("pp-zero1", "optimizer", 1), ("cp-zero3", "count", 1), ("ep-zero3", "forward", 2)]


@pytest.fixture(scope="module")
def undisturbed(make: Make) -> Callable[[str], Job]:
    """The job of a strategy that nothing disturbed."""

    @cache
    def done(strategy: str) -> Job:
        job = make(f"{strategy}-whole", strategy=strategy, world=4)
        assert job.train(job.write()) == [0] * 4, job.log.read_text()[-3000:]
        assert job.saved() == [10, STEPS]
        return job

    return done


@pytest.mark.prove
@pytest.mark.parametrize(("strategy", "phase", "rank"), PHASES)
def test_a_rank_killed_in_any_phase_of_a_step(
    make: Make, undisturbed: Callable[[str], Job], strategy: str, phase: str, rank: int
) -> None:
    """While it computes, others wait for what it sends: the next stage, the other of its ring, or those whose tokens go
    to its experts."""
    job = make(f"{strategy}-{phase}-{rank}", strategy=strategy, world=4)
    words = job.write()
    codes = job.train(words, {rank: f"{phase}:{KILL}:{rank}"})
    assert job.fired(f"{phase}-{KILL}-{rank}")
    assert codes == [KILLED if other == rank else 1 for other in range(4)]
    assert job.saved() == [SAVE]
    assert job.train(words) == [0] * 4
    assert job.begun_at() == [0, SAVE]
    job.same_as(undisturbed(strategy))


@pytest.mark.prove
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_killed_while_it_saves(make: Make, undisturbed: Callable[[str], Job], strategy: str) -> None:
    """The second checkpoint is not there, and the first one serves."""
    job = make(f"{strategy}-save", strategy=strategy, world=4)
    words = job.write(checkpoint={"asynchronous": True})
    codes = job.train(words, sabotage=("kill_in_save", 3, 2 * SAVE, "torn"))
    assert job.fired("save-torn") and codes == [1, 1, 1, KILLED]
    assert job.saved() == [SAVE]
    assert job.train(words) == [0] * 4
    assert job.begun_at() == [0, SAVE]
    job.same_as(undisturbed(strategy))


@pytest.mark.prove
@pytest.mark.parametrize("strategy", ["tp-zero3", "pp-zero1", "cp-zero3"])
def test_it_goes_on_without_the_axis(make: Make, whole: Job, strategy: str) -> None:
    """And computes what the run of two ranks did: losses within 1e-6 relative, in fp32. (Of ep, in float64 and to the
    bit: tests/parity/test_ep_moves.py.)"""
    four = make(f"{strategy}-resized", strategy=strategy, world=4)
    assert four.train(four.write(), {rank: f"count:{KILL}:{rank}" for rank in range(4)}) == [KILLED] * 4
    two = replace(four, strategy="zero1", world=2)
    assert two.train(two.write()) == [0, 0]
    assert two.begun_at() == [0, SAVE]
    for mine, theirs in zip(two.numbers(), whole.numbers(), strict=True):
        assert mine[2] == pytest.approx(theirs[2], rel=1e-6)
        assert mine[3] == pytest.approx(theirs[3], rel=1e-5)
