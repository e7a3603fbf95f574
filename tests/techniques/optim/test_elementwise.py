"""Optimizers that update every number by itself, against torch's own or the formula of the paper, and what plans say of
them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.prove import certify
from shardwise.prove.pool import RankPool
from shardwise.spec.load import load_recipe
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.plan import Batch, Lora, Offload, Optim, Plan, Precision
from shardwise.spec.recipe import OptimSection
from shardwise.techniques import optim
from shardwise.techniques.optim import elementwise
from tests.drift.test_drift import check, plan_of
from tests.prove.pairs import SPEC, with_all
from tests.prove.test_certify import DRAWN, NoRanks

NAMES = ["sgd", "lion"]
STEPS = 6
RATE, DECAY, FIRST, SECOND = 0.03, 0.1, 0.8, 0.9


def settings(name: str) -> OptimSection:
    return OptimSection(name=name, learning_rate=RATE, weight_decay=DECAY, beta1=FIRST, beta2=SECOND)


def expected(name: str, weight: Tensor, gradients: list[Tensor]) -> Tensor:
    """By torch's own SGD, and by Lion's algorithm 2, one number at a time."""
    if name == "sgd":
        parameter = nn.Parameter(weight.clone())
        theirs = torch.optim.SGD([parameter], lr=RATE, momentum=FIRST, weight_decay=DECAY)
        for gradient in gradients:
            parameter.grad = gradient
            theirs.step()
        return parameter.detach()
    found = []
    for place, value in enumerate(weight.flatten().tolist()):
        mean = 0.0
        for grad in (float(gradient.flatten()[place]) for gradient in gradients):
            toward = FIRST * mean + (1 - FIRST) * grad
            value -= RATE * ((toward > 0) - (toward < 0) + DECAY * value)
            mean = SECOND * mean + (1 - SECOND) * grad
        found.append(value)
    return torch.tensor(found, dtype=weight.dtype).view(weight.shape)


def made(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any, list[Tensor]]:
    torch.manual_seed(0)
    layer = nn.ModuleDict({"head": nn.Linear(5, 7, bias=False, dtype=dtype)})
    optimizer = optim.build([layer], settings(name), Plan(optim=Optim(name)))
    optim.set_learning_rate(optimizer, RATE, settings(name))
    return layer["head"], optimizer, [torch.randn(7, 5, dtype=dtype) for _ in range(STEPS)]


@pytest.mark.parametrize("piece", [11, 2**16])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_formula(name: str, scaled: bool, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is multiplied by a half is one of half the size. A skipped step changes nothing."""
    monkeypatch.setitem(elementwise.PIECE, "cpu", piece)
    layer, optimizer, gradients = made(name)
    right = expected(name, layer.weight.detach(), [gradient * (0.5 if scaled else 1.0) for gradient in gradients])
    for gradient in gradients:
        for skip in (False, True):
            layer.weight.grad = gradient * (torch.inf if skip else 1.0)
            optim.update(optimizer, torch.tensor(skip), torch.tensor(0.5, dtype=torch.float64) if scaled else None)
    torch.testing.assert_close(layer.weight.detach(), right, rtol=1e-12, atol=1e-14)
    assert float(optimizer.state[layer.weight]["step"]) == STEPS


@pytest.mark.parametrize("name", NAMES)
def test_in_bf16_it_is_computed_in_fp32(name: str) -> None:
    """One step is that of fp32 numbers, rounded."""
    layer, optimizer, (gradient, *_) = made(name, torch.bfloat16)
    right = expected(name, layer.weight.detach().float(), [gradient.float()]).bfloat16()
    layer.weight.grad = gradient
    optimizer.step()
    assert torch.equal(layer.weight.detach(), right)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_and_sent_is_what_was_planned(name: str) -> None:
    for sharding in ("ddp", "zero1", "zero3"):
        plan = plan_of(sharding, 8, batch=Batch(2, 2, 32, 40), optim=Optim(name))
        check(plan, ranks=(7,))
        check(replace(plan, lora=Lora(4, 8.0)), ranks=(7,))
    check(plan_of("zero3", 8, batch=Batch(2, 1, 32, 40), optim=Optim(name), precision=Precision("bf16")), ranks=(7,))
    check(plan_of("zero3", 8, batch=Batch(2, 1, 32, 40), optim=Optim(name), offload=Offload("host")), ranks=(7,))


LAYOUTS = {"tp and zero3": with_all("ZeRO-3", "tp", "sp", "offload")[1], "stages": with_all("1f1b", "LoRA")[1]}


@pytest.mark.big
@pytest.mark.parametrize("plan", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_certified(ranks: RankPool, name: str, plan: Plan) -> None:
    """Its own steps, under the plan's layout against one process; saved, it goes on under another layout."""
    subject = certify.subject_of(DRAWN, SPEC, replace(plan, optim=Optim(name)), 16)
    assert subject.small is not None and subject.small.plan.optim.name == name
    checks = [certify.run(subject, proof, 0, ranks) for proof in ("parity", "dtypes", "checkpoint")]
    checks += [
        certify.run(subject, "drift", rank, NoRanks()) for rank in certify.drift_ranks(subject.plan.layout, "quick")
    ]
    assert not [check for check in checks if check.problems]
    assert OPTIMIZERS[name].title in checks[0].case


@pytest.mark.parametrize("name", NAMES)
def test_what_it_does_not_read_is_refused(name: str) -> None:
    for words in (["optim.eps=1e-6"], ["optim.moments=bf16"]):
        with pytest.raises(ConfigError, match=f"CFG008.*has no effect with `optim.name: {name}`"):
            load_recipe(None, ["model=m", f"optim.name={name}", *words])
    assert load_recipe(None, ["model=m", f"optim.name={name}", "optim.eps=1e-8"]).optim.name == name, "as it is anyhow"
    refused = optim.check(SPEC, Plan(optim=Optim(name, moments="bf16")), None)  # type: ignore[arg-type]
    assert [problem.code for problem in refused] == ["PLAN012"]
