"""A run that goes on with fewer ranks and another strategy; and one that has no good checkpoint left."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest

from tests.faults.conftest import Make
from tests.faults.job import KILL, SAVE, STEPS, Job
from tests.said import shows

pytestmark = pytest.mark.timeout(400)
KILLED = -signal.SIGKILL


def hashes(job: Job, kind: str, step: int) -> dict[str, str]:
    found: dict[str, str] = json.loads((job.directory / f"{kind}-{step}.json").read_text())
    return found


@pytest.mark.prove
def test_four_ranks_zero3_then_two_ranks_zero1_then_one(make: Make, whole: Job) -> None:
    """Each begins with exactly the tensors that the one before saved. Losses go on within 1e-6 relative of the run of
    two: sums are taken in another order, in fp32."""
    tell = ("tell_tensors",)
    four = make("resized", strategy="zero3", world=4)
    words = four.write()
    assert four.train(words, {rank: f"count:7:{rank}" for rank in range(4)}, tell) == [KILLED] * 4
    two = replace(four, strategy="zero1", world=2)
    # Killed once a step has shown that what was saved before it is good.
    assert two.train(two.write(), {rank: f"count:12:{rank}" for rank in range(2)}, tell) == [KILLED] * 2
    one = replace(four, strategy="ddp", world=1)
    assert one.train(one.write(), sabotage=tell) == [0]
    assert one.begun_at() == [0, SAVE, 2 * SAVE]
    for step in (SAVE, 2 * SAVE):
        saved, loaded = hashes(one, "saved", step), hashes(one, "loaded", step)
        assert saved == loaded
        assert sum(name.startswith("model.") for name in saved) == len(saved) // 3 == 21
        assert len(set(saved.values())) > 60  # not all zeros
    assert hashes(one, "saved", SAVE) != hashes(one, "saved", 2 * SAVE)
    assert one.steps() == list(range(1, STEPS + 1))
    for mine, theirs in zip(one.numbers(), whole.numbers(), strict=True):
        assert mine[2] == pytest.approx(theirs[2], rel=1e-6)
        assert mine[3] == pytest.approx(theirs[3], rel=1e-5)
        assert mine[4:] == theirs[4:] and mine[:2] == theirs[:2]


@pytest.mark.prove
def test_a_run_with_muon_goes_on_with_another_layout(make: Make) -> None:
    """Killed on two ranks that share each layer, it goes on on four that shard, with exactly the momenta that were
    saved: 1 number of a matrix of a block, AdamW's 2 of the rest. Losses go on as those of a run that nothing cut, but
    for fp32 sums in another order and matrices that Newton-Schulz iterations round to bf16 likewise."""
    whole, tell, muon = make("muon-whole"), ("tell_tensors",), {"optim": {"name": "muon"}}
    assert whole.train(whole.write(**muon)) == [0, 0], whole.log.read_text()[-3000:]
    two = make("muon", strategy="tp-zero3")
    assert two.train(two.write(**muon), {rank: f"count:{KILL}:{rank}" for rank in range(2)}, tell) == [KILLED] * 2
    four = replace(two, strategy="zero3", world=4)
    assert four.train(four.write(**muon), sabotage=tell) == [0] * 4
    assert four.begun_at() == [0, SAVE] and four.steps() == list(range(1, STEPS + 1))
    saved = hashes(four, "saved", SAVE)
    assert saved == hashes(four, "loaded", SAVE)
    assert sum(name.startswith("optim.momentum_buffer.layers.") for name in saved) == 14
    assert not [name for name in saved if name.startswith("optim.exp_avg.layers.") and "norm" not in name]
    for mine, theirs in zip(four.numbers(), whole.numbers(), strict=True):
        assert mine[2] == pytest.approx(theirs[2], rel=2e-3) and mine[4:] == theirs[4:] and mine[:2] == theirs[:2]


@pytest.mark.prove
def test_no_good_checkpoint_is_not_taken_for_none(make: Make, whole: Job) -> None:
    """One flipped bit in each: the run refuses, names them all, and changes nothing; asked for, it starts afresh."""
    job = make("corrupt")
    words = job.write()
    assert job.train(words, {0: "logging:12:0"}) == [KILLED, 1]
    assert job.saved() == [SAVE, 2 * SAVE]
    flipped = []
    for path in sorted((job.directory / "checkpoints").glob("step-*")):
        file = max(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        flipped.append(file)
    before = {path: path.read_bytes() for path in (job.directory / "checkpoints").rglob("*") if path.is_file()}
    metrics = (job.directory / "metrics.jsonl").read_bytes()

    job.log.unlink()
    assert job.train(words) == [65, 65]
    found = job.ended()
    assert (found.kind, found.exit_code) == ("error", 65)
    assert found.problems[0]["code"] == "CKPT016" and len(found.problems) == 3
    printed = job.log.read_text()
    assert shows(printed, "2 checkpoints", "none can be") and "--allow-fresh-start" in printed
    for file in flipped:
        assert file.parent.name in printed and file.name in printed
    assert (job.directory / "metrics.jsonl").read_bytes() == metrics
    for path, data in before.items():
        assert path.name.startswith(".generation") or path.read_bytes() == data

    assert job.train([*words, "--allow-fresh-start"]) == [0, 0]
    assert job.begun_at() == [0, 0]
    assert job.numbers() == whole.numbers() and job.weights() == whole.weights()
    assert job.saved() == [2 * SAVE, STEPS]


@pytest.mark.prove
def test_the_newest_checkpoint_being_bad_the_one_before_serves(make: Make, whole: Job) -> None:
    job = make("corrupt-newest")
    words = job.write()
    assert job.train(words, {0: "logging:12:0"}) == [KILLED, 1]
    file = max((job.directory / "checkpoints" / "step-00000010").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    assert job.train(words) == [0, 0]
    assert job.begun_at() == [0, SAVE]
    assert shows(job.log.read_text(), "step-00000005", "5 steps")
    job.same_as(whole)
