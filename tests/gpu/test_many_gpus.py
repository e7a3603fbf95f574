"""Layouts over several GPUs, with NCCL, compute what one process on a CPU computes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from shardwise.models.config import ModelSpec
from shardwise.prove import parity
from shardwise.spec.plan import Plan, Remat
from tests.parity.cases import BF16, FP64, TIED, UNTIED, plan

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

Job = tuple[ModelSpec, Plan, int]
"""What is trained, how, and for how many steps."""

CASES = [
    (strategy, world)
    for world in (2, 4)
    if world <= torch.cuda.device_count()
    for strategy in ("ddp", "zero1", "zero2", "zero3", *(["hsdp"] if world == 4 else []))
]


def rank_of(rank: int, world: int, port: int, work: Path, jobs: list[Job]) -> None:
    """One rank: does every job and leaves its traces in ``work``."""
    torch.cuda.set_device(rank)
    store = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=rank, world_size=world)
    traces = [parity.train(rank, spec, plan, steps, torch.device("cuda", rank)) for spec, plan, steps in jobs]
    torch.save(traces, work / f"traces-{rank}")
    dist.barrier()
    dist.destroy_process_group()


def trained(work: Path, world: int, jobs: list[Job]) -> list[list[parity.Trace]]:
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
    """The direction of every gradient of the first step."""
    jobs = [(UNTIED, plan(strategy, world, BF16, Remat(), m), 1) for m in (1, 4)]
    for (spec, of, steps), traces in zip(jobs, trained(tmp_path, world, jobs), strict=True):
        found = parity.compare(parity.plain(parity.job_of(spec, of, steps)), traces)
        assert found.turn.error < 2e-3, f"{found} of {of}"
