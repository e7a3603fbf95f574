"""``run.profile_steps``: the trace is there, names its steps, and changes no number."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.runtime.small_run import directory, numbers, recipe, train_here, weights_hash
from tests.runtime.test_loop import Broken, at, fail


@pytest.mark.prove
def test_a_profile_changes_no_number_and_holds_the_steps(tmp_path: Path) -> None:
    """Steps 2 to 4: those that the report's measurements would otherwise take, which come later then."""
    plain, profiled = recipe(tmp_path, "plain"), recipe(tmp_path, "profiled", run={"profile_steps": "2:4"})
    train_here(plain)
    train_here(profiled)
    assert numbers(directory(profiled)) == numbers(directory(plain))
    assert weights_hash(directory(profiled)) == weights_hash(directory(plain))
    [trace] = (directory(profiled) / "profile").iterdir()
    assert trace.name == "rank-0-steps-2-4.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"step 2", "step 3", "step 4", "aten::mm"} <= names and "step 5" not in names
    assert "memory per rank" in (directory(profiled) / "report.md").read_text()
    assert not (directory(plain) / "profile").exists()


def test_a_run_that_breaks_keeps_what_was_traced(tmp_path: Path) -> None:
    made = recipe(tmp_path, "broken", run={"profile_steps": "2:90"})
    with pytest.raises(Broken):
        train_here(made, at(3, fail))
    assert [path.name for path in (directory(made) / "profile").iterdir()] == ["rank-0-steps-2-3.json.gz"]
