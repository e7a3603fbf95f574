"""A rank that is slowed is named, and since when."""

from __future__ import annotations

import pytest

from tests.faults.conftest import Make
from tests.said import refuses, shows

SLOW, NAMED = 20, 30


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_a_slowed_rank_is_named_within_thirty_steps(make: Make) -> None:
    job = make("slow")
    words = job.write(train={"max_steps": SLOW + NAMED}, checkpoint={"save_steps": 100})
    assert job.train(words, sabotage=("busy", 1, SLOW)) == [0, 0], job.log.read_text()[-2000:]
    assert job.fired("busy")
    [named] = job.events("slow rank")
    assert SLOW < named["step"] <= SLOW + NAMED
    assert shows(named["what"], "rank 1", "node 0", "cpu", "step")
    since = int(named["what"].partition("since step ")[2].split(":")[0])
    assert SLOW - 7 <= since <= SLOW + 7
    assert refuses(job.log.read_text(), "SLOW001", "rank 1", as_warning=True)
    assert "rank 1 (node 0" in (job.directory / "report.md").read_text()
