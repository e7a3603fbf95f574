"""What only reports, on several ranks: where it fails the run goes on, and no rank waits for another."""

from __future__ import annotations

import re

import pytest

from tests.faults.conftest import Make
from tests.faults.job import Job

pytestmark = pytest.mark.timeout(400)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("where", "who", "said"),
    [
        ("logits", 0, r"error\[NUM002\]: .*logits"),
        ("tokenizer", 1, "UnicodeDecodeError: .*0xff"),
        ("forward", -1, "OutOfMemoryError"),
    ],
)
def test_a_sample_that_fails_costs_nothing_but_itself(make: Make, whole: Job, where: str, who: int, said: str) -> None:
    """Of weights that are gathered block by block: before training and after it, on one rank or on all."""
    job = make(f"sample-{where}")
    assert job.train(job.write(), sabotage=("spoil_sample", who, where)) == [0, 0], job.log.read_text()[-3000:]
    log = job.log.read_text()
    for step in (0, 12):
        assert re.search(rf"warning\[REP001\]: .*step {step} .*{said}", log)
    assert "step time" in (job.directory / "report.md").read_text()
    job.same_as(whole)
