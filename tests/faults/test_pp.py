"""A hang in a pipeline: the rank at the end of the chain of those that wait."""

from __future__ import annotations

from shardwise.runtime.faults.heartbeat import RankStatus, culprit, hang
from tests.said import shows


def status(rank: int, phase: str, count: int) -> RankStatus:
    return RankStatus(rank, 1, 3, count, 0.0, 0.0, 0, phase, "", "elsewhere")


def test_the_rank_at_the_end_of_the_chain_is_blamed_and_not_the_one_that_is_furthest_behind(tmp_path: object) -> None:
    """Rank 1 of four hangs. Those after it wait for one another, and have done less."""
    pages = [status(0, "waits 1 0.3", 31), status(1, "forward 1.5", 29), status(2, "waits 1 2.5", 26)]
    pages.append(status(3, "waits 2 3.5", 22))
    late = culprit(pages)
    assert late is not None and late.rank == 1
    problem = hang(pages, 60.0, tmp_path)  # type: ignore[arg-type]
    assert problem is not None and problem.code == "HANG001"
    assert shows(problem.what, "rank 1", "nothing", "60 s")
    assert shows(problem.what, "rank 2", "rank 1", "stage 2", "micro-batch 5")
    assert shows(problem.where, "phase forward", "stage 1", "micro-batch 5")


def test_without_a_pipeline_the_rank_that_is_furthest_behind_is_blamed() -> None:
    late = culprit([status(0, "count", 9), status(1, "forward", 7), status(2, "count", 9)])
    assert late is not None and late.rank == 1
