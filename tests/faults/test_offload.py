"""An optimizer in a file: kills within a step and within a save lose nothing, for the file is not what a run goes on
from; and a full disk is told before the first step."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from tests.faults.conftest import Make
from tests.faults.job import SAVE, Job

pytestmark = pytest.mark.timeout(400)
KILLED = -signal.SIGKILL
NVME = {"offload": {"optimizer": "nvme"}}
PLACES = 3
"""Of a parameter in the file."""


def test_killed_within_a_step(make: Make, whole: Job) -> None:
    """Some weights and moments are a step ahead of others when it dies. It goes on from its checkpoint to the losses of
    the run that was in memory and that nothing disturbed, and nothing is left of the file."""
    job = make("nvme-pass", strategy="nvme-zero3")
    words = job.write(**NVME)
    parameters = 2 + 9 * 2 + 1  # of two blocks and both ends
    codes = job.train(words, sabotage=("kill_in_pass", 1, PLACES * (parameters * (SAVE + 2) + 4)))
    assert job.fired("pass") and codes == [1, KILLED]
    assert job.saved() == [SAVE]
    assert [*job.directory.glob(".offload-*")] == []
    assert job.train(words) == [0, 0], job.log.read_text()[-3000:]
    assert job.begun_at() == [0, SAVE]
    job.same_as(whole)


@pytest.mark.prove
def test_killed_within_a_save(make: Make, whole: Job) -> None:
    job = make("nvme-save", strategy="nvme-zero3")
    words = job.write(**NVME, checkpoint={"asynchronous": True})
    codes = job.train(words, sabotage=("kill_in_save", 1, 2 * SAVE, "torn"))
    assert job.fired("save-torn") and codes == [1, KILLED]
    assert job.saved() == [SAVE]
    assert job.train(words) == [0, 0]
    assert job.begun_at() == [0, SAVE]
    job.same_as(whole)


@pytest.mark.prove
def test_it_goes_on_in_memory(make: Make, whole: Job) -> None:
    """And what was begun on NVMe ends as what was always in memory."""
    job = make("nvme-left", strategy="nvme-zero3")
    assert job.train(job.write(**NVME), {rank: f"count:7:{rank}" for rank in range(2)}) == [KILLED] * 2
    other = replace(job, strategy="zero3")
    assert other.train(other.write()) == [0, 0]
    assert other.begun_at() == [0, SAVE]
    other.same_as(whole)


@pytest.mark.prove
def test_a_disk_without_room_ends_the_run_before_a_step(make: Make) -> None:
    job = make("nvme-full", strategy="nvme-zero3")
    codes = job.train(job.write(**NVME), sabotage=("no_room", 1, "offload"))
    assert job.fired("full-offload") and set(codes) == {73}
    said = job.log.read_text()
    assert "OUT003" in said and "the optimizer of this rank needs" in said and "offload.directory=" in said
