"""What ranks of the pool do for tests/runtime/test_own.py: a loop of one's own, in the pool's process group."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import shardwise
from examples import transformers_loop, vision_loop
from shardwise.distributed.meshes import Meshes, meshes
from shardwise.distributed.slices import local, local_slice, replication
from shardwise.errors import TrainingError
from shardwise.models.attention import MaskSpec
from shardwise.models.decoder import Decoder
from shardwise.runtime import own
from shardwise.runtime import world as processes
from shardwise.runtime.checkpoint.storage import ShardWriter
from shardwise.spec.plan import Plan
from shardwise.techniques import shard
from tests.parity.cases import UNTIED as ODD
from tests.runtime.checkpoint.checkpoint_ranks import changed

UNTIED = replace(ODD, intermediate_size=28)
"""What two ranks divide; its vocabulary they do not."""
EXAMPLES = {"transformers": transformers_loop.main, "vision": vision_loop.main}


@contextmanager
def started(world: int, nodes: int = 1) -> Iterator[None]:
    """As if a launcher had started these ranks, the process group standing already."""
    me = replace(processes.process(), world_size=world, local_world_size=world // nodes)

    @contextmanager
    def joined(plan: Plan) -> Iterator[Meshes]:
        yield meshes(plan.layout, "cpu")

    with changed() as patch:
        patch(processes, "process", lambda: me)
        patch(own, "world", joined)
        yield


def example(rank: int, world: int, name: str, strategy: str, directory: str, steps: int = 6) -> list[float]:
    with started(world):
        return EXAMPLES[name](strategy, directory, steps)


class Model(nn.Module):
    """Two blocks and what is around them, a buffer and a weight that is frozen among it."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 10)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 10), nn.GELU()) for _ in range(2))
        self.out = nn.Linear(10, 3)
        self.register_buffer("scale", torch.tensor(0.5))
        self.temperature = nn.Parameter(torch.tensor(1.2))
        self.into.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = x + block(x) * self.scale
        return self.out(x) * self.temperature


def left(rank: int, world: int, strategy: str) -> int:
    """Parameters that are there after a model was trained for a step and let go of."""
    with started(world):
        plan = own.make_plan(strategy)  # type: ignore[arg-type]
        model = own.parallelize(Model(), plan, meshes(plan.layout, "cpu"))
        kept = [ref(parameter) for parameter in model.parameters()]
        own.backward(model, model(torch.ones(2, 6)).sum())
        del model
    gc.collect()
    return sum(parameter() is not None for parameter in kept)


class Mixed(nn.Module):
    """A layer of its own type."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(6, 8, dtype=torch.bfloat16)
        self.wide = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x.to(self.narrow.weight.dtype)).float())


def mixed(rank: int, world: int) -> dict[str, Tensor]:
    """The gradients of one step under ddp, the same rows on every rank."""
    torch.manual_seed(0)
    with started(world):
        plan = own.make_plan("ddp")
        model = own.parallelize(Mixed(), plan, meshes(plan.layout, "cpu"))
        own.backward(model, model(rows(0)[0].float()).square().mean())
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class Routed(nn.Module):
    """Ranks use different heads, experts and adapters: by ``route`` a head (their shapes differ), an expert out of a
    list of blocks, and an adapter or none inside each block. One of each is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 10)
        self.blocks = nn.ModuleList(Adapted() for _ in range(2))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(10, 5 + i), nn.Linear(5 + i, 10)) for i in range(4))
        self.heads = nn.ModuleList(nn.Linear(10, size) for size in (3, 2, 5))
        self.blocks[0].frozen.requires_grad_(False)

    def forward(self, x: Tensor, route: int) -> Tensor:
        x = self.into(x.to(self.into.weight.dtype))
        for block in self.blocks:
            x = x + block(x, route)
        x = x + self.experts[route](x)
        return self.heads[route % 2](x)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(10, 10)
        self.adapters = nn.ModuleList(nn.Linear(10, 10, bias=bool(i)) for i in range(3))

    def forward(self, x: Tensor, route: int) -> Tensor:
        x = nn.functional.gelu(self.frozen(x))
        return x + self.adapters[route](x) if route < 2 else x


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.paths = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor, route: int) -> Tensor:
        return self.paths[route](x)


ROUTES = [[0, 0, 1, 1], [2, 1, 0, 1], [0, 0, 0, 0], [1, 2, 0, 0]]
"""By step, the route of each quarter of the rows: of a rank's micro-batches, one after another."""


def routed_step(model: nn.Module, step: int, part: int) -> Tensor:
    """The mean loss over a quarter of a step's rows."""
    return model(rows(step)[0].chunk(4)[part], ROUTES[step % len(ROUTES)][part]).square().mean()


def routed(rank: int, world: int, strategy: str, compute: str = "fp64", nodes: int = 1) -> Any:
    """Which gradients there are in each step, and full weights after them, with decay of everything. A strategy that
    is reduced ``once`` adds micro-batches up whole."""
    torch.manual_seed(rank)
    with started(world, nodes):
        name, _, once = strategy.partition(" ")
        plan = own.make_plan(name, compute=compute)  # type: ignore[arg-type]
        plan = replace(plan, shard=replace(plan.shard, sync_each_batch=not once))
        model = Routed()
        own.parallelize(model, plan, meshes(plan.layout, "cpu"), whole=["experts"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        present, each = [], 4 // world
        for step in range(len(ROUTES)):
            for index in range(each):
                loss = routed_step(model, step, rank * each + index)
                own.backward(model, loss, last=index == each - 1, micro_batches=each)
            present.append({name for name, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
        return present, {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in model.named_parameters()
        }


def apart(rank: int, world: int, strategy: str, whole: Sequence[str] = (), able: bool = True) -> list[str]:
    """What is said to each rank when they ran different blocks, of equal shapes. ``able``: this torch reduces zeros
    for gradients that a rank does not have."""
    with started(world), changed() as patch:
        if not able:
            patch(shard, "reduce_unused", lambda part: False)
        plan = own.make_plan(strategy)  # type: ignore[arg-type]
        model = own.parallelize(Forked(), plan, meshes(plan.layout, "cpu"), whole)
        try:
            own.backward(model, model(rows(0)[0].float(), rank).square().mean())
        except TrainingError as error:
            return [str(error)]
        return []


def averaged(rank: int, world: int, directory: str) -> dict[str, Tensor]:
    """The buffers of this rank, after a forward of its own or after a resume."""
    with started(world):
        plan = own.make_plan("ddp")
        model = nn.Sequential(*(nn.Sequential(nn.BatchNorm1d(6), nn.Identity()) for _ in range(3)))
        own.parallelize(model, plan, meshes(plan.layout, "cpu"))
        checkpoints = own.Checkpoints(directory, model, own.optimizer(model))
        if checkpoints.resume() is None:
            model(rows(rank)[0].float())
            checkpoints.save(1)
            checkpoints.close()
        return dict(model.named_buffers())


class Drawn:
    """A sampler of a rank's own: a generator and what it drew last."""

    def __init__(self, seed: int) -> None:
        self.generator, self.last = torch.Generator().manual_seed(seed), (0.0, float("nan"))

    def draw(self) -> float:
        self.last = (self.last[0] + 1, float(torch.rand((), generator=self.generator)))
        return self.last[1]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.last = state["last"]


def stopped(rank: int, world: int, strategy: str, directory: str, asked_at: int) -> Any:
    """Train until a stop is asked of the last rank in the midst of step ``asked_at``, or 6 steps: the step at which
    this rank left, what it drew, the rate that was left, and whether signals are as they were."""
    before = signal.getsignal(signal.SIGTERM)
    with started(world):
        plan = own.make_plan(strategy)  # type: ignore[arg-type]
        model = own.parallelize(Mixed().float(), plan, meshes(plan.layout, "cpu"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=10)
        drawn = Drawn(rank)
        kept = {"scheduler": scheduler, "drawn": drawn}
        checkpoints = own.Checkpoints(directory, model, optimizer, per_rank=["drawn"], **kept)
        step, values = (checkpoints.resume() or {"step": 0})["step"], []
        while step < 6 and not checkpoints.stopping:
            values.append(drawn.draw())
            if step == asked_at and rank == world - 1:
                signal.raise_signal(signal.SIGTERM)
            own.backward(model, model(rows(step)[0].float()).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
        checkpoints.save(step)
        events = checkpoints.close()
        assert [event.kind for event in events] == ["committed"], events
        return step, values, optimizer.param_groups[0]["lr"], signal.getsignal(signal.SIGTERM) == before


def resumed_at_once(rank: int, world: int, directory: str) -> int:
    """The step that a loop which saves, and at once wants back what it saved, goes on from."""

    def slowly(self: ShardWriter, *given: Any) -> Any:
        time.sleep(0.3)
        return write(self, *given)

    write = ShardWriter.write_data
    with started(world), changed() as patch:
        patch(ShardWriter, "write_data", slowly)
        model = own.parallelize(Mixed().float(), own.make_plan(), meshes(own.make_plan().layout, "cpu"))
        checkpoints = own.Checkpoints(directory, model, own.optimizer(model))
        checkpoints.save(1)
        step: int = (checkpoints.resume() or {"step": 0})["step"]
        assert [event.kind for event in checkpoints.close()] == ["committed"]
        return step


def rows(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=draw).double(), torch.randn(8, 3, generator=draw).double()


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def train(rank: int, world: int, strategy: str, settings: dict[str, Any], steps: int, directory: str = "") -> Any:
    """Losses, norms and full weights after ``steps`` in float64, two micro-batches a step, saving at the end to
    ``directory`` and going on from what is there."""
    torch.manual_seed(rank)  # every rank begins with rank 0's weights all the same
    units = settings.pop("units", ())
    with started(world, settings.pop("nodes", 1)):
        plan = own.make_plan(strategy, compute="fp64", **settings)  # type: ignore[arg-type]
        model = Model().double()
        own.parallelize(model, plan, meshes(plan.layout, "cpu"), units=units)
        assert {name for name in units if isinstance(model.get_submodule(name), FSDPModule)} == set(units)
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


def decoder(
    rank: int,
    world: int,
    strategy: str,
    settings: dict[str, Any],
    steps: int,
    directory: str = "",
    bounds: list[int] | None = None,
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """A loop over Shardwise's decoder in float64: losses of its whole logits, norms, weights at the end. With ``cp``
    processes have some tokens each of a row, in documents that end at ``bounds``."""
    torch.manual_seed(rank)  # all begin with the first one's weights
    with started(world):
        plan = own.make_plan(strategy, compute="fp64", **settings)  # type: ignore[arg-type]
        with own.world(plan) as mesh:
            model = own.parallelize(Decoder(UNTIED), plan, mesh)
            optimizer = own.optimizer(model, learning_rate=1e-2)
            losses, norms = [], []
            for step in range(steps):
                rows = texts(step).chunk(mesh.size("batch"))[mesh.index("batch")]
                loss = cut_loss(model, mesh, rows, bounds) if "cp" in settings else next_token_loss(model, rows)
                own.backward(model, loss)
                norms.append(own.clip_grad_norm(model, 0.5))
                optimizer.step()
                optimizer.zero_grad()
                mean = loss.detach().clone()
                mesh.sum(mean, "cp")
                losses.append(mean.item() / mesh.size("cp"))
            if directory:
                checkpoints = own.Checkpoints(directory, model, optimizer)
                checkpoints.save(steps)
                checkpoints.close()
            return losses, norms, {name: whole(p.detach()) for name, p in model.named_parameters()}


def loaded(rank: int, world: int, strategy: str, settings: dict[str, Any], directory: str) -> dict[str, Tensor]:
    """The whole weights of a decoder that was filled from ``directory`` once it was cut."""
    with started(world):
        plan = own.make_plan(strategy, **settings)  # type: ignore[arg-type]
        model = own.parallelize(Decoder(UNTIED), plan, meshes(plan.layout, "cpu"))
        shardwise.load_weights(model, directory)
        return {name: whole(p.detach()) for name, p in model.named_parameters()}


def texts(step: int) -> Tensor:
    """int64 [4,9]."""
    return torch.randint(UNTIED.vocab_size, (4, 9), generator=torch.Generator().manual_seed(step))


def next_token_loss(
    model: nn.Module, ids: Tensor, positions: Tensor | None = None, mask: MaskSpec | None = None
) -> Tensor:
    """Where nothing else is said, each row is a document."""
    positions = torch.arange(8).expand(len(ids), -1) if positions is None else positions
    logits = model(ids[:, :-1], positions, mask or MaskSpec())
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def cut_loss(model: nn.Module, mesh: Meshes, rows: Tensor, bounds: list[int] | None) -> Tensor:
    """Of the tokens that this process has of the rows."""
    documents = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    ids, labels, positions, mask = own.cut_rows(mesh, rows[:, :-1], rows[:, 1:], documents)
    assert ids.shape == (len(rows), 8 // mesh.size("cp"))
    logits = model(ids, positions, mask)
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor of which ranks hold slices, whatever cut it, on every rank."""
    full = torch.zeros(tensor.shape, dtype=tensor.dtype)
    copies = replication(tensor, torch.distributed.get_world_size())
    full[local_slice(tensor)] = local(tensor) / copies
    torch.distributed.all_reduce(full)
    return full
