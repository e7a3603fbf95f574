"""What the tests of checkpoints run on each rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.errors import DataError
from shardwise.runtime.checkpoint import commit
from shardwise.runtime.checkpoint import save as checkpoint
from shardwise.runtime.checkpoint.inflight import SaveResult
from shardwise.runtime.checkpoint.save import RunCheckpoints
from shardwise.runtime.checkpoint.storage import ShardReader, ShardWriter
from shardwise.spec.layout import cut
from shardwise.spec.recipe import Checkpoint
from tests.runtime.checkpoint.faults import faulty, naive_begin, naive_publish

SHAPES = {"embed.weight": (11, 5), "layers.0.up.weight": (7, 3), "layers.0.norm.weight": (2,), "head.bias": (1,)}
"""Uneven on purpose: over 4 ranks, a norm of 2 and a bias of 1 leave some ranks without a row."""
CUT: dict[str, int | None] = {"embed.weight": 0, "layers.0.up.weight": 1, "layers.0.norm.weight": None, "head.bias": 0}
"""The dim that tensor parallelism cuts; dim 0 is then cut twice."""


def values(seed: int = 0) -> dict[str, Tensor]:
    """The state to be saved, whole: weights, two moments, and what is not sharded at all."""
    make = torch.Generator().manual_seed(seed)
    state = {f"model.{name}": torch.randn(shape, generator=make) for name, shape in SHAPES.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        state |= {f"optim.{moment}.{name}": torch.randn(shape, generator=make) for name, shape in SHAPES.items()}
    state["model.scale"] = torch.randn((), generator=make)
    state["model.half"] = torch.randn((3, 4), generator=make).bfloat16()
    state["optim.empty"] = torch.zeros(0, 4)
    return state


def columns(tensor: Tensor, mesh: DeviceMesh, dim: int | None) -> DTensor:
    """Cut along ``dim`` over tensor-parallel ranks, the last of which may have less; None: whole on each."""
    if dim is None:
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    start, stop = cut((0, tensor.shape[dim]), mesh.size(), mesh.get_local_rank())
    piece = tensor.narrow(dim, start, stop - start).contiguous()
    return DTensor.from_local(piece, mesh, [Shard(dim)], run_check=False, shape=tensor.shape, stride=tensor.stride())


def placed(seed: int, layout: str, world: int) -> dict[str, Tensor]:
    """``values(seed)`` in a layout: plain, fsdp, hsdp, or these over tensor parallelism. Sharded by fully_shard itself,
    moments like their weights."""
    state = values(seed)
    if layout == "plain":
        return state
    half = world // 2
    axes = {
        "fsdp": ((world,), ("shard",)),
        "hsdp": ((2, half), ("replicate", "shard")),
        "tp": ((world,), ("tp",)),
        "ddp-tp": ((2, half), ("replicate", "tp")),
        "fsdp-tp": ((half, 2), ("shard", "tp")),
    }[layout]
    mesh = init_device_mesh("cpu", axes[0], mesh_dim_names=axes[1])
    data = tuple(axis for axis in axes[1] if axis != "tp")
    for name, shape in SHAPES.items():
        for prefix in ("model", "optim.exp_avg", "optim.exp_avg_sq"):
            module = torch.nn.Module()
            module.weight = torch.nn.Parameter(state[f"{prefix}.{name}"])
            if "tp" in axes[1]:
                module.weight = torch.nn.Parameter(columns(module.weight.detach(), mesh["tp"], CUT[name]))
            if "shard" in data:
                fully_shard(module, mesh=mesh[data])
            assert isinstance(module.weight, DTensor) and module.weight.shape == shape
            state[f"{prefix}.{name}"] = module.weight.detach()
    return state


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Bitwise, and of the same names, shapes and types."""
    return left.keys() == right.keys() and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in ((left[name], right[name]) for name in left)
    )


def stages(rank: int, world: int, directory: str, forget: str = "") -> tuple[bool, list[str]]:
    """Two ranks with other layers each and one tensor of both: saved, loaded from, and whether everything came back.
    Nobody asks for ``forget``; then the codes and texts of what is wrong."""

    def part(seed: int) -> dict[str, Tensor]:
        state, last = values(seed), rank == world - 1
        mine = [name for name in state if name == "model.scale" or ("head" in name or "up" in name) == last]
        return {name: state[name] for name in mine}

    RunCheckpoints(directory, Checkpoint(asynchronous=False), "run").save(part(1), {"step": 1}, 1)
    found = {name: tensor for name, tensor in part(2).items() if not forget or forget not in name}
    try:
        RunCheckpoints(directory, Checkpoint(), "run").resume(found, log=lambda line: None)
    except DataError as error:
        return False, [f"{problem.code} {problem.what}" for problem in error.problems]
    return all(torch.equal(found[name].view(-1), value.view(-1)) for name, value in part(1).items()), []


def save(rank: int, world: int, directory: str, layout: str, step: int, **settings: Any) -> list[SaveResult]:
    checkpoints = RunCheckpoints(directory, Checkpoint(**settings), "run")
    state = placed(step, layout, world)
    checkpoints.save(state, {"step": step, "cursor": 10 * step}, step)
    checkpoints.copied()
    for tensor in state.values():  # the state moves on while the save is under way
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(-1)
    return checkpoints.wait()


def load(rank: int, world: int, directory: str, layout: str, step: int) -> dict[str, Any]:
    """Resume in ``layout``; what was found, and whether every tensor is bitwise what was saved at ``step``."""
    checkpoints = RunCheckpoints(directory, Checkpoint(), "run")
    state = placed(99, layout, world)
    lines: list[str] = []
    facts = checkpoints.resume(state, log=lines.append)
    return {"facts": facts, "same": same(whole(state), values(step)), "lines": lines}


@contextmanager
def changed() -> Iterator[Callable[[Any, str, Any], None]]:
    """Set attributes until the end of the block. (pytest takes long to import, and ranks are started often.)"""
    undo: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, name: str, value: Any) -> None:
        undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    try:
        yield patch
    finally:
        for owner, name, value in undo:
            setattr(owner, name, value)


def save_with_fault(
    rank: int, world: int, directory: str, victim: int, fault: str, at: int, naive: bool = False
) -> tuple[list[SaveResult], list[str], float]:
    """Save step 2; on ``victim`` the ``at``-th system call goes wrong. Events, this rank's calls, seconds."""
    calls: list[str] = []
    disk = faulty(commit.DISK, fault if rank == victim else "", at, calls)
    checkpoints = RunCheckpoints(directory, Checkpoint(save_total_limit=2), "run", disk=disk)
    begun = time.monotonic()
    with changed() as patch:
        patch(checkpoint, "RETRIES_S", (0.01, 0.01))
        if naive:
            patch(commit, "begin", naive_begin)
            patch(commit, "publish", naive_publish)
        checkpoints.save(values(2), {"step": 2}, 2)
        events = checkpoints.wait()
    return events, calls, time.monotonic() - begun


def save_unlike(rank: int, world: int, directory: str, how: str) -> list[list[SaveResult]]:
    """Two saves, the first with something wrong on rank 1 only."""
    checkpoints = RunCheckpoints(directory, Checkpoint(), "run")
    state: dict[str, Any] = dict(values(1))
    facts: dict[str, Any] = {"step": 1}
    wrong = rank == 1
    if how == "object" and wrong:
        state["model.half"] = "not a tensor"
    if how == "dtype" and wrong:
        state["model.half"] = torch.zeros(3, 4, dtype=torch.complex64)
    if how == "facts":
        facts["bad"] = {1, 2}
    checkpoints.save(state, facts, 1, finite=not (how == "finite" and wrong))
    first = checkpoints.wait()
    checkpoints.save(values(2), {"step": 2}, 2)
    return [first, checkpoints.wait()]


def save_forgetful(rank: int, world: int, directory: str) -> list[SaveResult]:
    """Rank 1 loses one of its results, as DCP's writer threads can (pytorch#191391)."""
    with changed() as patch:
        if rank == 1:
            write = ShardWriter.write_data

            def lossy(self: ShardWriter, plan: Any, planner: Any) -> Any:
                results = write(self, plan, planner).wait()
                future: torch.futures.Future[Any] = torch.futures.Future()
                future.set_result(results[1:])
                return future

            patch(ShardWriter, "write_data", lossy)
        return save(rank, world, directory, "fsdp", 1)


def stock(rank: int, world: int, directory: str) -> bool:
    """Our storage pair under torch's own dcp.save and dcp.load."""
    writer = ShardWriter(directory, "run")
    writer.describe(7, b"{}")
    dcp.save(placed(7, "fsdp", world), storage_writer=writer)
    state = placed(99, "hsdp", world)
    dcp.load(state, storage_reader=ShardReader(f"{directory}/step-00000007"))
    return same(whole(state), values(7))
