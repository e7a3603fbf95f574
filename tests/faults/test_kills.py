"""A rank killed anywhere costs at most the steps since the last checkpoint, and not a bit of the result."""

from __future__ import annotations

import signal

import pytest

from tests.faults.conftest import Make
from tests.faults.job import KILL, SAVE, STEPS, Job

pytestmark = pytest.mark.timeout(400)
KILLED = -signal.SIGKILL


@pytest.mark.prove
def test_the_same_job_twice_is_the_same_bitwise(make: Make, whole: Job) -> None:
    """The control: without a fault a second run equals the first, and another seed is told apart."""
    job = make("control")
    assert job.train(job.write()) == [0, 0]
    assert job.begun_at() == [0] and job.ended().kind == "done"
    job.same_as(whole)


@pytest.mark.prove
def test_ranks_that_are_connected_late_train_alike(make: Make, whole: Job) -> None:
    """As more than 64 are: also what was killed then goes on, to the same bits."""
    job = make("late")
    assert job.train(job.write(), {1: f"backward:{KILL}:1"}, sabotage=("connected_late",))[1] == KILLED
    assert job.train(job.write(), sabotage=("connected_late",)) == [0, 0]
    assert job.fired("late")
    job.same_as(whole)


@pytest.mark.prove
def test_another_seed_is_told_apart(make: Make, whole: Job) -> None:
    """The other control: what the comparison looks at does change when the run does."""
    job = make("seed")
    assert job.train(job.write(run={"seed": 1})) == [0, 0]
    assert not {line[2:4] for line in job.numbers()} & {line[2:4] for line in whole.numbers()}
    assert not set(job.last_checkpoint().values()) & set(whole.last_checkpoint().values())
    assert job.weights() != whole.weights()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("phase", "rank"),
    [
        ("data", 1),
        ("count", 0),
        ("forward", 1),
        ("backward", 0),
        ("reduce", 1),
        ("clip", 0),
        ("optimizer", 1),
        ("logging", 0),
        ("logging", 1),
    ],
)
def test_a_rank_killed_in_any_phase_of_a_step(make: Make, whole: Job, phase: str, rank: int) -> None:
    job = make(f"{phase}-{rank}")
    words = job.write()
    codes = job.train(words, {rank: f"{phase}:{KILL}:{rank}"})
    assert job.fired(f"{phase}-{KILL}-{rank}")
    assert (codes[rank], codes[1 - rank]) == (KILLED, 1)
    found = job.ended()
    assert (found.kind, found.rank, found.restartable) == ("peer_lost", 1 - rank, True)
    assert job.saved() == [SAVE]
    assert job.train(words) == [0, 0]
    assert job.begun_at() == [0, SAVE]
    job.same_as(whole)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("rank", "when", "left"), [(1, "torn", [SAVE]), (0, "unnamed", [SAVE]), (0, "named", [SAVE, 2 * SAVE])]
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_killed_while_it_saves(
    make: Make, whole: Job, asynchronous: bool, rank: int, when: str, left: list[int]
) -> None:
    """The second checkpoint is there whole, or not at all and the first one serves."""
    job = make(f"save-{when}-{'asynchronous' if asynchronous else 'synchronous'}")
    words = job.write(checkpoint={"asynchronous": asynchronous})
    codes = job.train(words, sabotage=("kill_in_save", rank, 2 * SAVE, when))
    assert job.fired(f"save-{when}")
    assert (codes[rank], codes[1 - rank]) == (KILLED, 1)
    assert job.saved() == left
    assert job.train(words) == [0, 0]
    assert job.begun_at() == [0, left[-1]]
    job.same_as(whole)
    assert not [path.name for path in (job.directory / "checkpoints").iterdir() if "tmp" in path.name]


@pytest.mark.prove
def test_all_ranks_killed(make: Make, whole: Job) -> None:
    job = make("all")
    words = job.write()
    assert job.train(words, {rank: f"reduce:{KILL}:{rank}" for rank in range(2)}) == [KILLED, KILLED]
    assert job.fired(f"reduce-{KILL}-0") and job.fired(f"reduce-{KILL}-1")
    assert job.saved() == [SAVE]
    assert job.train(words) == [0, 0]
    assert job.begun_at() == [0, SAVE]
    job.same_as(whole)


@pytest.mark.prove
def test_a_run_killed_again_and_again(make: Make, whole: Job) -> None:
    """Before the first checkpoint, twice in the same stretch, and after the last step: four deaths, one result."""
    job = make("again")
    words = job.write()
    deaths = [("backward:3:1", 1, 0), ("clip:7:0", 0, 0), ("forward:9:1", 1, SAVE), (f"end:{STEPS}:0", 0, SAVE)]
    for fault, rank, _ in deaths:
        assert job.train(words, {rank: fault})[rank] == KILLED
        assert job.fired(fault.replace(":", "-"))
    assert job.train(words) == [0, 0]
    assert job.begun_at() == [begun for *_, begun in deaths] + [STEPS]
    job.same_as(whole)


@pytest.mark.prove
def test_a_rank_killed_while_it_starts(make: Make, whole: Job) -> None:
    """In the first moments there is nothing to lose, and nothing may be left that a new start stumbles over."""
    job = make("start")
    words = job.write()
    assert job.train(words, sabotage=("kill_at_begin", 1)) == [1, KILLED]
    assert job.fired("begin")
    assert job.train(words) == [0, 0]
    job.same_as(whole)


@pytest.mark.prove
def test_a_rank_killed_while_it_resumes(make: Make, whole: Job) -> None:
    """Loading changes nothing on disk."""
    job = make("resume")
    words = job.write()
    assert job.train(words, {0: f"data:{KILL}:0"})[0] == KILLED
    before = job.last_checkpoint()
    assert job.train(words, sabotage=("kill_at_load", 0)) == [KILLED, 1]
    assert job.fired("load")
    assert job.saved() == [SAVE] and job.last_checkpoint() == before
    assert job.train(words) == [0, 0]
    job.same_as(whole)
