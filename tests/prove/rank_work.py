"""What the tests of the pool ask of its ranks."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardwise.prove import parity
from shardwise.spec.plan import Plan
from tests.parity.test_tp import EVEN


def nothing(rank: int, world: int) -> None:
    pass


def place(rank: int, world: int) -> tuple[int, int, int]:
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total)


def devices(rank: int, world: int) -> bytes | None:
    """What CUDA reads of the environment."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    found: bytes | None = libc.getenv(b"CUDA_VISIBLE_DEVICES")
    return found


def process(rank: int, world: int) -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


def fail_on(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        raise ValueError(f"rank {rank} was told to fail")
    dist.barrier()


def sharded_gradient(rank: int, world: int, replicas: int) -> torch.Tensor:
    """The gradient that a linear layer gets when its weight is sharded on a mesh of ``replicas`` by the rest."""
    shape, names = (
        ((world,), ("dp_shard",)) if replicas == 1 else ((replicas, world // replicas), ("dp_replicate", "dp_shard"))
    )
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    layer = nn.Linear(4, 8, bias=False)
    nn.init.ones_(layer.weight)
    fully_shard(layer, mesh=mesh)
    layer(torch.full((1, 4), float(rank))).sum().backward()
    return layer.weight.grad.full_tensor()


def hang_on(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        sleep_for_long()
    dist.barrier()


def sleep_for_long() -> None:
    time.sleep(600)


def abort_on(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        os.abort()
    dist.barrier()


def die_on(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        os.kill(os.getpid(), 9)
    dist.barrier()


def exit_on(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        raise SystemExit(3)
    dist.barrier()


def unpicklable(rank: int, world: int) -> object:
    return lambda: rank


def train(rank: int, world: int, plan: Plan) -> None:
    parity.take_steps(rank, EVEN, plan, 1)


def threads(rank: int, world: int) -> int:
    return len(list(Path("/proc/self/task").iterdir()))
