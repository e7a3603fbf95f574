"""Layouts over several GPUs, with NCCL, compute what one process on a CPU computes."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from shardwise.models.config import ModelSpec
from shardwise.prove import parity
from shardwise.spec.plan import Plan, Remat
from tests.faults.job import KILL, SAVE, STEPS, Job, write_text
from tests.faults.ranks import ranks_to_kill
from tests.parity import pipes, rings
from tests.parity.cases import BF16, FLASH, FP64, TIED, UNTIED, plan
from tests.said import shows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # as in test_one_gpu.py
]

Work = tuple[ModelSpec, Plan, int]
"""What is trained, how, and for how many steps."""

CASES = [
    (strategy, world)
    for world in (2, 4)
    if world <= torch.cuda.device_count()
    for strategy in ("ddp", "zero1", "zero2", "zero3", *(["hsdp"] if world == 4 else []))
]


def rank_of(rank: int, world: int, port: int, work: Path, jobs: list[Work]) -> None:
    """One rank: does every job and leaves its traces in ``work``."""
    torch.cuda.set_device(rank)
    store = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=rank, world_size=world)
    traces = [parity.take_steps(rank, spec, plan, steps, torch.device("cuda", rank)) for spec, plan, steps in jobs]
    torch.save(traces, work / f"traces-{rank}")
    dist.barrier()
    dist.destroy_process_group()


def trained(work: Path, world: int, jobs: list[Work]) -> list[list[parity.Trace]]:
    """For each job the traces of all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(rank_of, (world, port, work, jobs), nprocs=world)
    ranks = [torch.load(work / f"traces-{rank}", weights_only=False) for rank in range(world)]
    return [list(traces) for traces in zip(*ranks, strict=True)]


@pytest.mark.parametrize(("strategy", "world"), CASES)
def test_parity_in_fp64(tmp_path: Path, strategy: str, world: int) -> None:
    """1e-9 after five AdamW steps, as on CPUs."""
    plans = [plan(strategy, world, FP64, remat, m) for remat in (Remat(), Remat("full")) for m in (1, 4)]
    jobs = [(spec, of, parity.STEPS) for spec in (UNTIED, TIED) for of in plans]
    for (spec, of, steps), traces in zip(jobs, trained(tmp_path, world, jobs), strict=True):
        found = parity.compare(parity.plain(parity.job_of(spec, of, steps)), traces)
        assert max(e.error for e in (found.loss, found.norm, found.gradient, found.weight)) < 1e-9, f"{found} of {of}"


@pytest.mark.parametrize(("strategy", "world"), CASES)
def test_parity_in_bf16(tmp_path: Path, strategy: str, world: int) -> None:
    """The direction of every gradient of the first step, with heads that the flash kernel serves."""
    jobs = [(FLASH, plan(strategy, world, BF16, Remat(), m), 1) for m in (1, 4)]
    for (spec, of, steps), traces in zip(jobs, trained(tmp_path, world, jobs), strict=True):
        found = parity.compare(parity.plain(parity.job_of(spec, of, steps)), traces)
        assert found.turn.error < 2e-3, f"{found} of {of}"


RINGS = [case for case in rings.CASES if case.model != "pairs" and case.plan.layout.world <= torch.cuda.device_count()]


@pytest.mark.parametrize("case", RINGS, ids=str)
def test_parity_of_rows_that_ranks_share_in_fp64(tmp_path: Path, case: rings.Case) -> None:
    """1e-9 after five AdamW steps, for every kind and mask, over NCCL."""
    jobs = [(case.spec, case.plan, parity.STEPS)]
    [traces] = trained(tmp_path, case.plan.layout.world, jobs)
    found = parity.compare(parity.plain(parity.job_of(*jobs[0])), traces, staged=case.pp > 1)
    assert max(e.error for e in (found.loss, found.norm, found.gradient, found.weight)) < 1e-9, f"{found} of {case}"


@pytest.mark.parametrize(
    ("schedule", "strategy", "degrees"),
    [
        (schedule, strategy, degrees)
        for schedule, strategy, degrees in [
            ("1f1b", "ddp", {}),
            ("interleaved", "ddp", {}),
            ("zbv", "ddp", {}),
            ("1f1b", "ddp", {"tp": 2}),
            ("interleaved", "zero1", {"dp_shard": 2}),
            ("zbv", "zero3", {"dp_shard": 2}),
        ]
        if 2 * prod(degrees.values()) <= torch.cuda.device_count()
    ],
)
def test_parity_of_pipelines_in_fp64(tmp_path: Path, schedule: str, strategy: str, degrees: dict[str, int]) -> None:
    """1e-9 after five AdamW steps, ends that are tied included."""
    specs = [pipes.spec_of(model, 2 * pipes.stages_per_rank(schedule)) for model in ("untied", "tied")]
    jobs = [(spec, pipes.plan(schedule, spec, strategy, **degrees), parity.STEPS) for spec in specs]
    world = jobs[0][1].layout.world
    for (spec, of, steps), traces in zip(jobs, trained(tmp_path, world, jobs), strict=True):
        found = parity.compare(parity.plain(parity.job_of(spec, of, steps)), traces, staged=True)
        assert max(e.error for e in (found.loss, found.norm, found.gradient, found.weight)) < 1e-9, f"{found} of {of}"


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Job]]:
    """A run of two ranks on two GPUs, sharded whole; it can be killed, and compared with another."""
    root = tmp_path_factory.mktemp("runs")
    write_text(root / "text")
    with ranks_to_kill() as ranks:
        yield lambda name: Job(root, name, ranks)


def words(job: Job, **run: Any) -> list[str]:
    """Saves beside training, and the same bits every time."""
    return job.write(run={"device": "cuda", "deterministic": True, **run}, checkpoint={"asynchronous": True})


def test_saved_beside_training_killed_and_resumed_it_is_the_whole_run(make: Callable[[str], Job]) -> None:
    """Bitwise: metrics, weights and moments. The second save waits for the first, so one of the two is there."""
    whole, killed = make("whole"), make("killed")
    assert whole.train(words(whole)) == [0, 0], whole.log.read_text()[-3000:]
    assert killed.train(words(killed), {1: f"backward:{STEPS - 1}:1"}) == [1, -signal.SIGKILL]
    assert killed.ended().kind == "peer_lost"
    assert killed.train(words(killed)) == [0, 0], killed.log.read_text()[-3000:]
    assert killed.begun_at() in ([0, SAVE], [0, 2 * SAVE])
    killed.same_as(whole)


def test_a_silent_rank_is_named_under_nccl(make: Callable[[str], Job]) -> None:
    """The other's main thread waits for the device; a thread beside it ends the run, long before NCCL's timeout."""
    job = make("silent")
    begin = time.monotonic()
    assert job.train(words(job, timeout_s=10.0), {1: f"forward:{KILL}:1:hang"}) == [1, -signal.SIGKILL]
    assert time.monotonic() - begin < 100.0
    [problem] = job.ended().problems
    assert problem["code"] == "HANG001" and problem["what"].startswith("rank 1 (host ")
    assert shows(problem["where"], "rank 1", "phase forward", f"step {KILL}")


@pytest.mark.parametrize(
    ("action", "code", "kind"), [("SIGKILL", -signal.SIGKILL, "peer_lost"), ("raise", 70, "crash")]
)
def test_ranks_leave_within_seconds_of_anothers_end_under_nccl(
    make: Callable[[str], Job], action: str, code: int, kind: str
) -> None:
    """Whose timeout is a minute, ten in the first steps. The one that fails takes NCCL down without waiting for it."""
    job = make(f"ended-{action}")
    begin = time.monotonic()
    assert job.train(words(job), {1: f"reduce:{KILL}:1:{action}"}) == [1, code]
    assert time.monotonic() - begin < 60.0
    assert job.ended().kind == kind
