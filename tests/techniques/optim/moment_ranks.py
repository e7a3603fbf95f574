"""What ranks do for tests/techniques/optim/test_moments.py and test_rounding.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardwise.distributed.meshes import meshes
from shardwise.distributed.slices import local, local_slice
from shardwise.runtime import own
from shardwise.techniques.optim.moments import AdamW8bit
from shardwise.techniques.optim.rounding import RoundedAdamW
from tests.runtime.checkpoint.checkpoint_ranks import columns
from tests.runtime.own_ranks import started

MATRICES: dict[str, tuple[tuple[int, int], int | None]] = {
    "rows": ((37, 300), 0),
    "columns": ((20, 1024), 1),
    "whole": ((50, 100), None),
    "few columns": ((3, 700), 1),
}
"""Shapes, and the dim that tensor-parallel ranks cut; of columns four ranks have a block each."""


def cut(rank: int, world: int, tp: int, kind: str) -> dict[str, Tensor]:
    """Some updates of matrices over ``tp`` ranks, and what is left of ``world`` by FSDP2; all of them whole."""
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("shard", "tp")) if world > 1 else None
    parameters: dict[str, nn.Parameter] = {}
    for index, (name, (shape, dim)) in enumerate(MATRICES.items()):
        module = nn.Module()
        module.weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(index)))
        if mesh is not None:
            module.weight = nn.Parameter(columns(module.weight.detach(), mesh["tp"], dim))
            if world > tp:
                fully_shard(module, mesh=mesh["shard"])
        parameters[name] = module.weight
    given = [{"params": list(parameters.items())}]
    optimizer = AdamW8bit(given, lr=0.01) if kind == "8 bit" else RoundedAdamW(given, lr=0.01)
    for number in range(4):
        for index, parameter in enumerate(parameters.values()):
            draw = torch.Generator().manual_seed(100 * number + index)
            parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).copy_(torch.randn(parameter.shape, generator=draw)[local_slice(parameter)])
        optimizer.step()
    kept = {f"{name} {key}": value for name, p in parameters.items() for key, value in optimizer.state[p].items()}
    found = parameters | kept
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).detach() for name, v in found.items()}


def train(rank: int, world: int, strategy: str, steps: int, directory: str, kind: str = "8 bit") -> dict[str, Any]:
    """Updates of two matrices (rows that the ranks do not divide) by gradients that are the same everywhere."""
    torch.manual_seed(0)
    with started(world):
        plan = own.make_plan(strategy)  # type: ignore[arg-type]
        model = nn.Sequential(nn.Linear(300, 37), nn.Linear(37, 150))
        model.to(torch.bfloat16 if kind == "bf16 all" else None)
        own.parallelize(model, plan, meshes(plan.layout, "cpu"))
        optimizer = (
            AdamW8bit(model.parameters(), lr=0.01)
            if kind == "8 bit"
            else RoundedAdamW([{"params": list(model.named_parameters())}], lr=0.01)
        )
        first, checkpoints = 0, None
        if directory:
            checkpoints = own.Checkpoints(directory, model, optimizer)
            first = (checkpoints.resume() or {"step": 0})["step"]
        for step in range(first, steps):
            for index, parameter in enumerate(model.parameters()):
                draw = torch.Generator().manual_seed(100 * step + index)
                whole = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
                parameter.grad = whole
                if isinstance(parameter, DTensor):
                    pieces = whole.chunk(world)
                    mine = pieces[rank] if rank < len(pieces) else whole[:0]
                    parameter.grad = DTensor.from_local(
                        mine, parameter.device_mesh, parameter.placements, shape=whole.shape, stride=whole.stride()
                    )
            optimizer.step()
        if checkpoints is not None:
            checkpoints.save(steps)
            checkpoints.close()
        weights = {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in model.named_parameters()
        }
        return {"step": steps, "weights": weights}


def divided(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    AdamW8bit([nn.Parameter(columns(torch.zeros(64, 300), mesh, 1))], lr=0.01)
