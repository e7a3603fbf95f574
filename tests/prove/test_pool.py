"""The pool of ranks: groups of the size asked, failures that name the culprit, and ranks that are replaced."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shardwise.prove.pool import RankFailure, RankPool
from tests.parity.test_tp import plan
from tests.prove import rank_work
from tests.traps import set_traps, sprung


@pytest.mark.prove
@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_default_group_has_the_size_asked(ranks: RankPool, world: int) -> None:
    total = world * (world - 1) // 2
    assert ranks.run(rank_work.place, world=world) == [(rank, world, total) for rank in range(world)]


def test_the_same_processes_serve_many_runs_with_one_thread_each(ranks: RankPool) -> None:
    first = ranks.run(rank_work.process, world=4)
    ranks.run(rank_work.place, world=2)
    assert ranks.run(rank_work.process, world=4) == first
    assert {threads for _, threads in first} == {1}
    assert len({pid for pid, _ in first}) == 4


def test_ranks_see_no_gpu(ranks: RankPool) -> None:
    assert ranks.run(rank_work.devices, world=2) == [b"", b""]


def test_meshes_of_one_run_do_not_leak_into_the_next(ranks: RankPool) -> None:
    """DTensor caches meshes by shape: worlds of several shapes in turn must each reduce over their own ranks."""
    for world, replicas in ((4, 1), (4, 2), (2, 1), (4, 2), (4, 1)):
        for gradient in ranks.run(rank_work.sharded_gradient, replicas, world=world):
            torch.testing.assert_close(gradient, torch.full((8, 4), (world - 1) / 2))


@pytest.mark.prove
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted where Linux lists them")
def test_groups_of_a_run_end_with_it(ranks: RankPool) -> None:
    """Each has threads, which wake all the time: hundreds of them left nothing of the processor to the work."""
    plans = [plan(strategy, 2, 2, sequence=True) for strategy in ("ddp", "zero3", "ddp", "zero3", "ddp")]
    counts = []
    for each in plans:
        ranks.run(rank_work.train, each, world=4)
        counts.append(ranks.run(rank_work.threads, world=4))
    assert counts[-1] == counts[1]


@pytest.mark.prove
def test_an_empty_run_takes_milliseconds() -> None:
    """Measured 0.1 s on 4 ranks, where new processes take 2 s: the best of ten, against a third of the first."""
    times = []
    with RankPool(4) as pool:
        for _ in range(11):
            start = time.monotonic()
            pool.run(rank_work.nothing, world=4)
            times.append(time.monotonic() - start)
    assert min(times[1:]) < times[0] / 3


def test_a_failing_rank_is_named_with_its_traceback(ranks: RankPool) -> None:
    """The others fail too, in the barrier, and may answer first; the culprit is told first all the same."""
    for culprit in (0, 3):
        with pytest.raises(RankFailure, match=f"^rank {culprit}: Traceback[^$]*rank {culprit} was told") as failure:
            ranks.run(rank_work.fail_on, culprit, world=4)
        assert failure.value.rank == culprit
    assert ranks.run(rank_work.place, world=2) == [(0, 2, 1), (1, 2, 1)]


@pytest.mark.prove
def test_a_hanging_rank_is_stopped_and_its_place_shown() -> None:
    with RankPool(2) as pool:
        pool.run(rank_work.nothing, world=2)
        pids = pool.pids()
        with pytest.raises(RankFailure, match=r"no answer after 1 s[^$]*sleep_for_long") as failure:
            pool.run(rank_work.hang_on, 1, world=2, timeout_s=1)
        assert failure.value.rank == 1
        assert ended(pids)
        assert pool.run(rank_work.place, world=2) == [(0, 2, 1), (1, 2, 1)]


def test_a_rank_that_dies_is_named_and_replaced(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"^rank 1: died .*SIGKILL"):
        ranks.run(rank_work.die_on, 1, world=2)
    with pytest.raises(RankFailure, match=r"^rank 1: Traceback[^$]*SystemExit: 3"):
        ranks.run(rank_work.exit_on, 1, world=2)
    assert ranks.run(rank_work.place, world=4)[3] == (3, 4, 6)


def test_of_a_rank_that_crashes_the_place_is_shown(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"^rank 1: died .*SIGABRT.; [^$]*abort_on"):
        ranks.run(rank_work.abort_on, 1, world=2)


def test_a_rank_killed_between_two_runs_is_replaced(ranks: RankPool) -> None:
    ranks.run(rank_work.nothing, world=2)
    victim = ranks.pids()[0]
    os.kill(victim, 9)
    assert ended([victim])
    assert ranks.run(rank_work.place, world=2) == [(0, 2, 1), (1, 2, 1)]


def test_a_result_that_cannot_be_sent_is_an_error(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"pickle"):
        ranks.run(rank_work.unpicklable, world=2)


def test_a_world_larger_than_the_pool_is_refused(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match=r"world 5 .* 1 .* 4 ranks"):
        ranks.run(rank_work.nothing, world=5)


@pytest.mark.prove
def test_ranks_end_when_their_parent_is_killed_and_run_no_code_of_its_directory(tmp_path: Path) -> None:
    """Even those inside a collective: rank 0 waits in a barrier and rank 1 sleeps when the parent goes."""
    program = (
        "import os, threading\n"
        "from shardwise.prove.pool import RankPool\n"
        "from tests.prove import rank_work\n"
        "if __name__ == '__main__':\n"
        "    pool = RankPool(2)\n"
        "    pool.run(rank_work.nothing, world=2)\n"
        "    print(*pool.pids(), flush=True)\n"
        "    threading.Timer(0.5, os.kill, (os.getpid(), 9)).start()\n"
        "    pool.run(rank_work.hang_on, 1, world=2)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    (script := tmp_path / "script.py").write_text(program)
    command, traps = [sys.executable, str(script)], set_traps(tmp_path / "traps")
    done = subprocess.run(command, cwd=traps, env=environment, capture_output=True, text=True, timeout=60)
    assert sprung(traps) == []
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    assert ended(pids)


def ended(pids: list[int]) -> bool:
    """Whether all of them are gone within five seconds."""
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be reaped does not. One whose other threads are still
    ending does: it holds its pipe open until the last of them is gone."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except FileNotFoundError:
        return False
