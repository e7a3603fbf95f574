"""What ranks of the pool do for tests/runtime/test_own_optim.py."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.distributed.meshes import Meshes, meshes
from shardwise.errors import ConfigError
from shardwise.models.decoder import Decoder
from shardwise.runtime import own
from tests.runtime.own_ranks import UNTIED, Model, loss_of, next_token_loss, rows, started, texts, whole

Case = tuple[str, dict[str, Any]]
SETTINGS: list[Case] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {}),
    ("Adadelta", {}),
    ("Adagrad", {}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("ASGD", {"t0": 1.0}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
]
WHOLE: list[Case] = [("Adafactor", {}), ("Rprop", {}), ("Muon", {})]
STEPS = 3


def make(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    name, settings = case
    trained = [p for p in model.parameters() if p.requires_grad and (p.ndim == 2 or name != "Muon")]
    made: torch.optim.Optimizer = getattr(torch.optim, name)(trained, lr=1e-2, **settings)
    return made


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Meshes | None, steps: Iterable[int]) -> None:
    """Of a module that was parallelized (this rank's rows) or, without ``mesh``, of one process."""
    share, of = (mesh.index("batch"), mesh.size("batch")) if mesh is not None else (0, 1)
    for step in steps:
        if isinstance(model, Decoder):
            loss = next_token_loss(model, texts(step).chunk(of)[share])
        else:
            x, y = rows(step)
            loss = loss_of(model, (x.chunk(of)[share], y.chunk(of)[share]))
        if model in own._PLANS:
            own.backward(model, loss)
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def model_of(tp: int) -> nn.Module:
    torch.manual_seed(0)
    return Model().double() if tp == 1 else Decoder(UNTIED).double()


def plain(case: Case, tp: int) -> dict[str, Tensor]:
    model = model_of(tp)
    loop(model, make(case, model), None, range(STEPS))
    return {name: p.detach() for name, p in model.named_parameters()}


def train(rank: int, world: int, strategy: str, tp: int, cases: Sequence[Case]) -> list[dict[str, Tensor]]:
    """Whole weights after training with each optimizer."""
    found = []
    with started(world):
        for case in cases:
            plan = own.make_plan(strategy, compute="fp64", tp=tp)  # type: ignore[arg-type]
            mesh = meshes(plan.layout, "cpu")
            model = own.parallelize(model_of(tp), plan, mesh)
            loop(model, make(case, model), mesh, range(STEPS))
            found.append({name: whole(p.detach()) for name, p in model.named_parameters()})
    return found


def refused(rank: int, world: int, strategy: str, name: str) -> tuple[str, bool]:
    """What is said of an optimizer at its first step, and whether that changed a weight."""
    with started(world):
        plan = own.make_plan(strategy)  # type: ignore[arg-type]
        model = own.parallelize(Model(), plan, meshes(plan.layout, "cpu"))
        optimizer = make((name, {}), model)
        before = [p.detach().clone() for p in model.parameters()]
        own.backward(model, model(rows(0)[0].float()).square().mean())
        try:
            optimizer.step(lambda: torch.zeros(()))
        except ConfigError as error:
            changed = any(not torch.equal(whole(p), whole(q)) for p, q in zip(before, model.parameters(), strict=True))
            return str(error), changed
        return "", True


class Foreign(torch.optim.SGD):
    """As of another package."""


def foreign(rank: int, world: int) -> list[str]:
    """The warnings of two steps of an optimizer that nobody knows."""
    with started(world), warnings.catch_warnings(record=True) as told:
        plan = own.make_plan("zero3")
        mesh = meshes(plan.layout, "cpu")
        model = own.parallelize(Model(), plan, mesh)
        optimizer = Foreign(model.parameters(), lr=1e-2)
        for step in range(2):
            own.backward(model, model(rows(step)[0].float()).square().mean())
            optimizer.step()
    return [str(warning.message) for warning in told if warning.category is UserWarning]
