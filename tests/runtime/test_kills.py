"""Ranks that are killed, stopped or silent: nothing is lost, and the right one is blamed."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from shardwise.runtime.outcome import clear_exit, read_exit
from tests.runtime.small_run import directory, numbers, recipe, train_ranks, weights_hash

STRATEGY = "zero2"
CHAINS = (
    ("data:4:1", "forward:5:1", "reduce:5:0", "save:6:1"),
    ("count:4:0", "backward:5:1", "clip:7:1"),
    ("optimizer:4:1", "logging:5:1", "save:3:0"),
)
"""Orders to kill, phase:step:rank, one after another in one run; its checkpoints are at 3, 6 and 8."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kills")


@pytest.fixture(scope="module")
def whole(root: Path) -> Path:
    made = recipe(root, "whole", checkpoint={"asynchronous": False})
    assert train_ranks(made, STRATEGY) == [0, 0]
    return directory(made)


@pytest.mark.parametrize("chain", CHAINS)
def test_ranks_killed_in_every_phase_cost_nothing(root: Path, whole: Path, chain: tuple[str, ...]) -> None:
    """Killed and started again several times, the run ends bitwise as the one that was not."""
    made = recipe(root, chain[0].replace(":", "-"), checkpoint={"asynchronous": False})
    run = directory(made)
    for order in sorted(chain, key=lambda order: int(order.split(":")[1])):
        killed = int(order[-1])
        codes = train_ranks(made, STRATEGY, fault=order)
        assert codes[killed] == -signal.SIGKILL and codes[1 - killed] == 1, order
        assert (run / f"fault-{order.replace(':', '-')}").exists()
        found = read_exit(run)
        assert found is not None and (found.kind, found.rank) == ("peer_lost", 1 - killed)
    assert train_ranks(made, STRATEGY) == [0, 0]
    assert numbers(run) == numbers(whole)
    assert weights_hash(run) == weights_hash(whole)


def test_the_first_rank_killed_in_an_asynchronous_run(root: Path, whole: Path) -> None:
    made = recipe(root, "asynchronous")
    assert train_ranks(made, STRATEGY, fault="reduce:5:0")[0] == -signal.SIGKILL
    assert train_ranks(made, STRATEGY) == [0, 0]
    assert numbers(directory(made)) == numbers(whole)
    assert weights_hash(directory(made)) == weights_hash(whole)


def test_an_exception_in_one_rank_is_the_cause_that_is_told(root: Path) -> None:
    made = recipe(root, "raised")
    assert train_ranks(made, "ddp", fault="forward:4:1:raise") == [1, 70]
    found = read_exit(directory(made))
    assert found is not None
    assert (found.kind, found.rank, found.step, found.phase) == ("crash", 1, 4, "forward")
    assert "fault ordered at forward of step 4 on rank 1" in found.message


def test_a_request_to_one_rank_stops_all_of_them(root: Path, whole: Path) -> None:
    made = recipe(root, "one-signal", checkpoint={"asynchronous": False})
    assert train_ranks(made, STRATEGY, fault="forward:4:1:SIGTERM") == [75, 75]
    found = read_exit(directory(made))
    assert found is not None and found.kind == "preempted"
    assert found.step in (4, 5)
    assert train_ranks(made, STRATEGY) == [0, 0]
    assert weights_hash(directory(made)) == weights_hash(whole)


@pytest.mark.parametrize("order", ["reduce:4:1:SIGSTOP", "data:4:1:hang"])
def test_a_silent_rank_is_named_with_its_phase_and_ended(root: Path, order: str) -> None:
    made = recipe(root, order.replace(":", "-"), run={"timeout_s": 4.0})
    begin = time.monotonic()
    codes = train_ranks(made, STRATEGY, fault=order)
    assert codes == [1, -signal.SIGKILL]
    assert time.monotonic() - begin < 40
    found = read_exit(directory(made))
    assert found is not None and found.kind == "hang" and found.rank == 0
    [problem] = found.problems
    assert problem["code"] == "HANG001"
    assert problem["what"].startswith("rank 1 (host ")
    assert "of step 4 for 4 s; the other 1 rank waits there" in problem["what"]
    phase = order.partition(":")[0]
    assert f"in phase {phase} of step 4" in problem["where"]
    clear_exit(directory(made))


def test_replicas_and_shards_end_at_the_same_weights(root: Path, whole: Path) -> None:
    """ddp sums in another order than zero2: losses agree to 1e-6 relative."""
    made = recipe(root, "ddp")
    assert train_ranks(made, "ddp") == [0, 0]
    for mine, theirs in zip(numbers(directory(made)), numbers(whole), strict=True):
        assert mine[2] == pytest.approx(theirs[2], rel=1e-6)
