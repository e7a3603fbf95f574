"""A rank that is silent, or fails alone: the others end in time, and the right one is blamed."""

from __future__ import annotations

import signal
import time

import pytest

from tests.faults.conftest import Make
from tests.faults.job import KILL, SAVE, Job
from tests.said import shows

pytestmark = pytest.mark.timeout(400)
TIMEOUT_S = 10.0
SLACK_S = 90.0
"""What starting four ranks and seven steps may take on a busy machine; torch's own timeouts are 1,800 s."""


@pytest.mark.prove
@pytest.mark.parametrize(
    ("strategy", "world", "phase", "action"),
    [("zero3", 2, "data", "hang"), ("hsdp", 4, "forward", "SIGSTOP")],
)
def test_a_silent_rank_is_named_with_its_phase_and_ended(
    make: Make, strategy: str, world: int, phase: str, action: str
) -> None:
    """One sleeps for ever in its data; the other is stopped where its peers wait for it in groups of two."""
    job = make(f"hang-{strategy}", strategy=strategy, world=world)
    words = job.write(run={"timeout_s": TIMEOUT_S})
    begin = time.monotonic()
    codes = job.train(words, {1: f"{phase}:{KILL}:1:{action}"})
    assert job.fired(f"{phase}-{KILL}-1")
    assert time.monotonic() - begin < TIMEOUT_S + SLACK_S
    assert codes[1] == -signal.SIGKILL and set(codes[:1] + codes[2:]) == {1}
    found = job.ended()
    assert found.kind == "hang" and found.exit_code == 1 and found.restartable
    [problem] = found.problems
    assert problem["code"] == "HANG001"
    assert problem["what"].startswith("rank 1 (host ")
    state = "is stopped" if action == "SIGSTOP" else "is still"
    assert shows(problem["where"], "rank 1", state, f"phase {phase}", f"step {KILL}")
    stacks = {path.name: path.read_text() for path in (job.directory / f"hang-step-{KILL}").iterdir()}
    assert "rank-00000.txt" in stacks
    if action == "hang":
        assert shows(stacks["rank-00001.txt"], "phase data", f"step {KILL}")
        assert "in fetch" in stacks["rank-00001.txt"]
    assert job.saved() == [SAVE]


@pytest.mark.prove
@pytest.mark.parametrize("action", ["hang", "SIGKILL", "raise"])
def test_where_nccl_says_nothing_the_watch_ends_the_run(make: Make, action: str) -> None:
    """A rank's main thread waits for the device, which waits in NCCL, whatever becomes of the others."""
    job = make(f"nccl-{action}")
    words = job.write(run={"timeout_s": 4.0})
    begin = time.monotonic()
    codes = job.train(words, {1: f"count:{KILL}:1:{action}"}, sabotage=("nccl_stands_in",))
    assert time.monotonic() - begin < SLACK_S
    assert codes == [1, 70 if action == "raise" else -signal.SIGKILL]
    found, printed = job.ended(), job.log.read_text()
    if action == "raise":
        assert (found.kind, found.rank) == ("crash", 1)
        return
    [problem] = found.problems
    if action == "hang":
        assert (found.kind, problem["code"]) == ("hang", "HANG001") and found.restartable
        assert shows(problem["what"], "rank 1", f"step {KILL}", "4 s")
        assert shows(problem["where"], "rank 1", "phase count", f"step {KILL}")
    else:
        assert (found.kind, found.rank, problem["code"]) == ("peer_lost", 0, "LOST001")
        assert problem["what"].startswith("rank 1 (pid ") and problem["what"].endswith(") has died")
        assert shows(problem["where"], "phase count", f"step {KILL}")
    assert f"error[{problem['code']}]: {problem['what']}" in printed, "no launcher of ours tells it"
    assert shows((job.directory / f"hang-step-{KILL}" / "rank-00000.txt").read_text(), "phase count", f"step {KILL}")


@pytest.mark.prove
def test_a_rank_that_keeps_the_lock_of_the_interpreter_is_named_and_ended(make: Make) -> None:
    """None of its threads runs, its watch included: the other rank reads on its page where it is."""
    job = make("locked")
    codes = job.train(job.write(run={"timeout_s": TIMEOUT_S}), sabotage=("hold_the_lock", 1, KILL))
    assert job.fired("lock") and codes == [1, -signal.SIGKILL]
    [problem] = job.ended().problems
    assert problem["code"] == "HANG001" and problem["what"].startswith("rank 1 (host ")
    assert shows(problem["where"], "rank 1", "is still", "phase count", f"step {KILL}")
    assert job.saved() == [SAVE]


@pytest.mark.prove
def test_after_a_hang_the_run_goes_on(make: Make, whole: Job) -> None:
    job = make("hang-resumed")
    words = job.write(run={"timeout_s": TIMEOUT_S})
    assert job.train(words, {0: f"clip:{KILL}:0:SIGSTOP"}) == [-signal.SIGKILL, 1]
    assert job.ended().problems[0]["what"].startswith("rank 0 (host ")
    assert job.train(job.write()) == [0, 0]
    assert job.begun_at() == [0, SAVE]
    job.same_as(whole)


@pytest.mark.matrix
@pytest.mark.parametrize("rank", [0, 1])
def test_the_exception_of_the_first_rank_is_told_and_not_what_its_peers_saw(make: Make, rank: int) -> None:
    job = make(f"raise-{rank}")
    codes = job.train(job.write(), {rank: f"backward:{KILL}:{rank}:raise"})
    assert job.fired(f"backward-{KILL}-{rank}")
    assert (codes[rank], codes[1 - rank]) == (70, 1)
    found = job.ended()
    assert (found.kind, found.rank, found.step, found.phase) == ("crash", rank, KILL, "backward")
    assert shows(found.message, "backward", f"step {KILL}", f"rank {rank}")
    printed = job.log.read_text()
    assert shows(printed, "backward", f"step {KILL}", f"rank {rank}")
    assert "Connection" not in printed and "LOST001" not in printed


@pytest.mark.matrix
@pytest.mark.parametrize(("step", "doing"), [(0, "longest batch"), (KILL, f"phase count of step {KILL}")])
def test_no_memory_on_one_rank_is_explained_by_category(make: Make, step: int, doing: str) -> None:
    """The kernel refuses, torch raises, and the user reads what the memory was for and what would need less; at the
    start, and at any step."""
    job = make(f"memory-{step}")
    codes = job.train(job.write(), sabotage=("no_memory", 1, step))
    assert job.fired("memory")
    assert codes == [1, 1]
    found = job.ended()
    assert (found.kind, found.rank) == ("memory", 1)
    [problem] = found.problems
    assert problem["code"] == "MEM001"
    assert shows(problem["what"], "out of memory", doing)
    assert shows(problem["what"], "268435456 bytes")
    changes = "train.micro_batch_size=1", "recompute.mode=full", "offload.optimizer=nvme", "train.seq_len=16"
    assert shows(problem["fix"], *changes)
