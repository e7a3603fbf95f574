"""Numbers that are not finite change nothing, on no rank, and are never saved."""

from __future__ import annotations

import json
import math

import pytest

from tests.faults.conftest import Make
from tests.faults.job import KILL, SAVE, STEPS, Job
from tests.said import shows

pytestmark = pytest.mark.timeout(400)


def states(job: Job, rank: int) -> dict[int, tuple[list[object], list[object]]]:
    """Of each step of this rank: what its weights, moments and count of updates were before it and after it."""
    lines = (job.directory / f"hashes-{rank}.jsonl").read_text().splitlines()
    return {step: (before, after) for step, before, after in map(json.loads, lines)}


@pytest.mark.matrix
@pytest.mark.parametrize(("factor", "who", "step"), [("inf", 0, 2 * SAVE), ("nan", 1, KILL)])
def test_a_bad_loss_on_one_rank_is_skipped_by_all(make: Make, whole: Job, factor: str, who: int, step: int) -> None:
    """The first case falls on the turn to save."""
    job = make(f"{factor}-once")
    assert job.train(job.write(), sabotage=("spoil_loss", who, [step], factor)) == [0, 0]
    assert job.fired(f"{factor}-{step}")
    for rank in range(2):
        seen = states(job, rank)
        assert sorted(seen) == list(range(1, STEPS + 1))
        for number, (before, after) in seen.items():
            if number == step:
                assert before == after
            else:
                assert all(old != new for old, new in zip(before, after, strict=True))
    lines = {line[0]: line for line in job.numbers()}
    assert sorted(lines) == list(range(1, STEPS + 1))
    assert [number for number, line in lines.items() if line[-1]] == [step]
    assert lines[step][2] is None
    assert all(math.isfinite(line[2]) and math.isfinite(line[3]) for number, line in lines.items() if number != step)
    assert job.numbers()[: step - 1] == whole.numbers()[: step - 1]
    assert job.saved() == ([SAVE, STEPS] if step == 2 * SAVE else [2 * SAVE, STEPS])
    assert [event["step"] for event in job.events("checkpoint skipped")] == ([step] if step == 2 * SAVE else [])


@pytest.mark.prove
def test_losses_that_stay_bad_stop_the_run_and_nothing_of_them_is_saved(make: Make, whole: Job) -> None:
    """Two skips are allowed: steps 9 and 10 (whose turn it is to save) pass, 11 stops the run. What is left is step 5,
    from which the run goes on, without the fault, as if nothing had been."""
    job = make("nan-for-ever")
    words = job.write(run={"max_skipped_steps": 2})
    assert job.train(words, sabotage=("spoil_loss", 1, list(range(9, STEPS + 1)), "nan")) == [1, 1]
    assert all(job.fired(f"nan-{step}") for step in (9, 10, 11)) and not job.fired("nan-12")
    found = job.ended()
    assert (found.kind, found.exit_code, found.step) == ("error", 1, 11)
    [problem] = found.problems
    assert problem["code"] == "NUM001"
    assert shows(problem["what"], "not finite", "3 steps", "run.max_skipped_steps", 2)
    step, samples = problem["where"].split(", samples ")
    assert step == "step 11" and all(number.isdigit() for number in samples.removesuffix(", ...").split(", "))
    for rank in range(2):
        seen = states(job, rank)
        assert seen[9][0] == seen[9][1] == seen[10][1] == seen[11][1] != seen[8][0]
    assert job.saved() == [SAVE]
    assert job.train(words) == [0, 0]
    assert job.begun_at() == [0, SAVE]
    job.same_as(whole)
