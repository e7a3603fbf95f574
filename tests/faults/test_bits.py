"""A bit that is wrong on one rank is found at the next comparison; and of quiet ranks none is named."""

from __future__ import annotations

import pytest

from tests.faults.conftest import Make
from tests.faults.job import SAVE, STEPS, Job
from tests.said import shows

pytestmark = pytest.mark.timeout(400)
EVERY = 3


def compared(job: Job) -> list[int]:
    return [event["step"] for event in job.events("bits compared")]


@pytest.mark.prove
@pytest.mark.parametrize(
    ("strategy", "world"),
    [("ddp", 2), ("zero3", 2), ("hsdp", 4), ("tp-zero3", 4), ("pp-zero1", 4), ("cp-zero3", 4), ("ep-zero3", 4)],
)
def test_quiet_ranks_have_the_same_bits_and_a_run_those_of_one_without(make: Make, strategy: str, world: int) -> None:
    jobs = [make(f"{strategy}-bits-{steps}", strategy=strategy, world=world) for steps in (None, EVERY)]
    for job, steps in zip(jobs, (None, EVERY), strict=True):
        assert job.train(job.write(run={"check_bits_steps": steps})) == [0] * world, job.log.read_text()[-3000:]
    assert compared(jobs[0]) == [] and compared(jobs[1]) == [3, SAVE, 6, 9, 10, STEPS]
    assert jobs[1].events("bits vary") == []
    jobs[1].same_as(jobs[0])


@pytest.mark.prove
@pytest.mark.parametrize(
    ("strategy", "world", "where", "named"),
    [
        ("ddp", 2, "gradient", "layers.0"),
        ("hsdp", 4, "weight", "embed.weight"),
        ("zero3", 4, "gradient", "layers.0"),
        ("ddp", 2, "moment", "optim.exp_avg.embed.weight"),
        ("zero3", 2, "gradient", "layers.0"),
        ("zero3", 2, "once", "layers.0"),
        ("tp-zero3", 4, "moment", "layers.0.attention_norm.weight"),
        ("tp-zero3", 4, "gradient", "ranks 0 and 1"),
        ("pp-zero1", 4, "gradient", "embed"),
        ("cp-zero3", 4, "once", "layers.0"),
        ("ep-zero3", 4, "gradient", "layers.0"),
    ],
)
def test_a_flipped_bit_is_found_at_the_next_comparison(
    make: Make, strategy: str, world: int, where: str, named: str
) -> None:
    """Of a tensor that two or four ranks have, or in what one computes: the run ends at once, and what was saved was
    compared before."""
    job = make(f"{strategy}-{world}-{where}", strategy=strategy, world=world)
    words = job.write(run={"check_bits_steps": EVERY})
    assert job.train(words, sabotage=("flip_bit", 1, 7, where)) == [1] * world, job.log.read_text()[-3000:]
    assert job.fired(where)
    found = job.ended()
    [problem] = found.problems
    assert (problem["code"], found.restartable) == ("SDC001", True)
    assert shows(problem["what"], 1) and shows(problem["what"], named) and shows(problem["where"], "step 9", 6)
    assert shows(problem["fix"], "step-00000005")
    assert compared(job) == [3, SAVE, 6] and job.saved() == [SAVE]
    assert job.train(words) == [0] * world
    assert job.begun_at() == [0, SAVE] and job.steps() == list(range(1, STEPS + 1))
