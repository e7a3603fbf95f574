"""What ranks do for tests/techniques/test_moments.py and test_rounding.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.runtime import own
from shardwise.techniques.meshes import meshes
from shardwise.techniques.moments import AdamW8bit
from shardwise.techniques.rounding import RoundedAdamW
from tests.runtime.own_ranks import started


def train(rank: int, world: int, strategy: str, steps: int, directory: str, kind: str = "8 bit") -> dict[str, Any]:
    """Updates of two matrices (rows that the ranks do not divide) by gradients that are the same everywhere."""
    torch.manual_seed(0)
    with started(world):
        plan = own.plan(strategy)  # type: ignore[arg-type]
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
