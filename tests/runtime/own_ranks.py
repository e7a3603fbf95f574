"""What ranks of the pool do for tests/runtime/test_own.py: a loop of one's own, in the pool's process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from examples import transformers_loop, vision_loop
from shardwise.runtime import own
from shardwise.runtime import world as processes
from shardwise.spec.plan import Plan
from tests.runtime.checkpoint_ranks import changed

EXAMPLES = {"transformers": transformers_loop.main, "vision": vision_loop.main}


@contextmanager
def started(world: int, nodes: int = 1) -> Iterator[None]:
    """As if a launcher had started these ranks, the process group standing already."""
    me = replace(processes.process(), world_size=world, local_world_size=world // nodes)

    @contextmanager
    def joined(plan: Plan) -> Iterator[DeviceMesh | None]:
        yield processes.mesh(plan.layout, "cpu")

    with changed() as patch:
        patch(processes, "process", lambda: me)
        patch(own, "world", joined)
        yield


def example(rank: int, world: int, name: str, strategy: str) -> list[float]:
    with started(world):
        return EXAMPLES[name](strategy)


class Model(nn.Module):
    """Two blocks and what is around them, a buffer and a weight that is frozen among it."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 10)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 10), nn.GELU()) for _ in range(2))
        self.out = nn.Linear(10, 3)
        self.register_buffer("scale", torch.tensor(0.5))
        self.into.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = x + block(x) * self.scale
        return self.out(x)


class Mixed(nn.Module):
    """A layer of its own type."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(6, 8, dtype=torch.bfloat16)
        self.wide = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x.bfloat16()).float())


def mixed(rank: int, world: int) -> dict[str, Tensor]:
    """The gradients of one step under ddp, the same rows on every rank."""
    torch.manual_seed(0)
    with started(world):
        plan = own.plan("ddp")
        model = own.parallelize(Mixed(), plan, processes.mesh(plan.layout, "cpu"))
        own.backward(model, model(rows(0)[0].float()).square().mean())
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def rows(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=draw).double(), torch.randn(8, 3, generator=draw).double()


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def train(rank: int, world: int, strategy: str, settings: dict[str, Any], steps: int, directory: str = "") -> Any:
    """Losses, norms and full weights after ``steps`` in float64, two micro-batches a step, saving at the end to
    ``directory`` and going on from what is there."""
    torch.manual_seed(rank)  # every rank begins with rank 0's weights all the same
    with started(world, settings.pop("nodes", 1)):
        plan = own.plan(strategy, compute="fp64", reduce="fp64", **settings)  # type: ignore[arg-type]
        model = Model().double()
        own.parallelize(model, plan, processes.mesh(plan.layout, "cpu"))
        optimizer = own.optimizer(model, learning_rate=1e-2)
        first, checkpoints = 0, None
        if directory:
            checkpoints = own.Checkpoints(directory, model, optimizer)
            first = (checkpoints.resume() or {"step": 0})["step"]
        losses, norms = [], []
        for step in range(first, steps):
            share = [x.chunk(world)[rank].chunk(2) for x in rows(step)]
            total = 0.0
            for index, batch in enumerate(zip(*share, strict=True)):
                loss = loss_of(model, batch)
                own.backward(model, loss, last=index == 1, micro_batches=2)
                total += float(loss.detach()) / 2
            norms.append(own.clip_grad_norm(model, 0.5))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
            if checkpoints is not None:
                checkpoints.save(step + 1)
        events = checkpoints.close() if checkpoints is not None else []
        assert all(event.kind in ("committed", "removed") for event in events), events
        weights = {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in model.named_parameters()
        }
        return losses, norms, weights
