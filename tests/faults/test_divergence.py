"""Runs that diverge: what they keep is good, whatever drives them, in fp16 and bf16, in every layout."""

from __future__ import annotations

import json
import math
from itertools import product

import pytest
from safetensors.torch import load_file

from tests.faults.conftest import Make
from tests.faults.job import Job

pytestmark = pytest.mark.timeout(400)
LAYOUTS = ("zero3", "tp-zero3", "pp-zero1", "ep-zero3")
CAUSES = ("rate", "jump", "rows", "stage", "rank")
SAVED, DIVERGES, LAST = 2, 4, 24
"""Every second step is saved, the fourth among them: its loss is finite, and its update is the one that spoils."""


def newest_kept(job: Job) -> int:
    """The step of the newest checkpoint, of which every number is finite, as of those before."""
    paths = sorted((job.directory / "checkpoints").glob("step-*"))
    for path in paths:
        tensors = [tensor for part in path.glob("**/*.safetensors") for tensor in load_file(part).values()]
        assert tensors and all(tensor.isfinite().all() for tensor in tensors), path
    return job.saved()[-1]


@pytest.mark.rare(40)
@pytest.mark.parametrize(("compute", "layout", "cause"), list(product(("fp16", "bf16"), LAYOUTS, CAUSES)))
def test_a_run_that_diverges_keeps_what_is_good(make: Make, compute: str, layout: str, cause: str) -> None:
    """It ends with NUM001, exports nothing, and goes on from what is kept with a finite loss."""
    job = make(f"{cause}-{compute}-{layout}", strategy=layout)
    changes = {"precision": {"compute": compute}, "checkpoint": {"save_steps": SAVED}}
    words = job.write(train={"max_steps": LAST}, **changes)
    codes = job.train(words, sabotage=("diverge", cause, DIVERGES))
    assert codes == [1, 1], job.log.read_text()[-3000:]
    assert all(job.fired(f"{cause}-{rank}") for rank in range(2))
    assert [problem["code"] for problem in job.ended().problems] == ["NUM001"]
    assert not (job.directory / "hf").exists()
    kept = newest_kept(job)
    assert kept == SAVED if cause != "rate" else kept >= SAVED
    again = [*job.write(train={"max_steps": kept + 1}, **changes), "--resume"]
    codes = job.train(again)
    lines = [json.loads(line) for line in (job.directory / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == kept + 1 and math.isfinite(lines[-1]["loss"])
    on_the_brink = cause == "rate" and codes == [
        1,
        1,
    ]  # finite gradients of one batch, not of the next
    assert codes == [0, 0] or on_the_brink, job.log.read_text()[-3000:]
    assert newest_kept(job) == (kept if on_the_brink else kept + 1)
