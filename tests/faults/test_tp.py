"""Kills under tensor parallelism beside zero3: two groups of two ranks."""

from __future__ import annotations

import signal

import pytest

from tests.faults.conftest import Make
from tests.faults.job import KILL, SAVE, STEPS, Job

pytestmark = pytest.mark.timeout(400)
KILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def undisturbed(make: Make) -> Job:
    job = make("tp-whole", strategy="tp-zero3", world=4)
    assert job.train(job.write()) == [0] * 4, job.log.read_text()[-3000:]
    assert job.saved() == [10, STEPS]
    return job


def ended_by(job: Job, killed: int, codes: list[int]) -> None:
    """Who was killed was, and every other rank ended by itself, for a reason that a new start takes away. Which of the
    three tells it first is open: each hears of the death from another group, or from a rank that has left before it."""
    assert codes == [KILLED if rank == killed else 1 for rank in range(4)]
    found = job.ended()
    assert (found.kind, found.exit_code, found.restartable) == ("peer_lost", 1, True)
    assert found.rank in {0, 1, 2, 3} - {killed}


@pytest.mark.prove
@pytest.mark.parametrize(
    ("phase", "rank"),
    [
        ("forward", 3),
        ("reduce", 2),
        ("logging", 0),
        ("data", 1),
        ("count", 2),
        ("backward", 0),
        ("clip", 3),
        ("optimizer", 1),
        ("logging", 3),
    ],
)
def test_a_rank_killed_in_any_phase_of_a_step(make: Make, undisturbed: Job, phase: str, rank: int) -> None:
    job = make(f"tp-{phase}-{rank}", strategy="tp-zero3", world=4)
    words = job.write()
    codes = job.train(words, {rank: f"{phase}:{KILL}:{rank}"})
    assert job.fired(f"{phase}-{KILL}-{rank}")
    ended_by(job, rank, codes)
    assert job.saved() == [SAVE]
    assert job.train(words) == [0] * 4
    assert job.begun_at() == [0, SAVE]
    job.same_as(undisturbed)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("rank", "when", "left"), [(3, "torn", [SAVE]), (0, "unnamed", [SAVE]), (0, "named", [SAVE, 2 * SAVE])]
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_killed_while_it_saves(
    make: Make, undisturbed: Job, asynchronous: bool, rank: int, when: str, left: list[int]
) -> None:
    """The second checkpoint is there whole, or not at all and the first one serves. The first rank names it."""
    job = make(f"tp-save-{when}-{'asynchronous' if asynchronous else 'synchronous'}", strategy="tp-zero3", world=4)
    words = job.write(checkpoint={"asynchronous": asynchronous})
    codes = job.train(words, sabotage=("kill_in_save", rank, 2 * SAVE, when))
    assert job.fired(f"save-{when}")
    ended_by(job, rank, codes)
    assert job.saved() == left
    assert job.train(words) == [0] * 4
    assert job.begun_at() == [0, left[-1]]
    job.same_as(undisturbed)
    assert not [path.name for path in (job.directory / "checkpoints").iterdir() if "tmp" in path.name]


@pytest.mark.big
def test_a_run_killed_again_and_again(make: Make, undisturbed: Job) -> None:
    """Before the first checkpoint, twice in the same stretch, and after the last step: each of the four ranks once."""
    job = make("tp-again", strategy="tp-zero3", world=4)
    words = job.write()
    deaths = [("backward:3:1", 1, 0), ("clip:7:2", 2, 0), ("forward:9:3", 3, SAVE), (f"end:{STEPS}:0", 0, SAVE)]
    for fault, rank, _ in deaths:
        ended_by(job, rank, job.train(words, {rank: fault}))
        assert job.fired(fault.replace(":", "-"))
    assert job.train(words) == [0] * 4
    assert job.begun_at() == [begun for *_, begun in deaths] + [STEPS]
    job.same_as(undisturbed)
