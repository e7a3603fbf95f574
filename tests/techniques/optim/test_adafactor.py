"""Adafactor against torch's own, what ranks that hold rows of a weight ask each other for, and what plans say of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.prove import certify
from shardwise.prove.pool import RankPool
from shardwise.spec.layout import Layout
from shardwise.spec.load import load_recipe
from shardwise.spec.plan import Batch, Lora, Offload, Optim, Plan, Precision, Shard
from shardwise.spec.recipe import OptimSection
from shardwise.techniques import optim
from shardwise.techniques.optim import adafactor
from tests.drift.test_drift import check, plan_of
from tests.prove.pairs import SPEC, with_all
from tests.prove.test_certify import DRAWN, NoRanks
from tests.said import refusal

NAME = "adafactor"
STEPS = 6


@pytest.mark.parametrize("piece", [11, 2**16])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("rate", [0.03, 0.5])
def test_the_formula(rate: float, scaled: bool, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is multiplied by a half is one of half the size. A skipped step changes nothing. Updates are
    large and small, as gradients become smaller; one weight is 0; and of the higher rate 1 / sqrt(t) is lower."""
    monkeypatch.setitem(adafactor.PIECE, "cpu", piece)
    torch.manual_seed(0)
    module = nn.ModuleDict({"head": nn.Linear(5, 7, dtype=torch.float64)})
    nn.init.zeros_(module["head"].bias)
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in module.parameters()]
    decays = [{"params": [each], "weight_decay": 0.1 * (each.ndim > 1)} for each in theirs]
    right = torch.optim.Adafactor(decays, lr=rate)
    settings = OptimSection(name=NAME, learning_rate=rate, weight_decay=0.1)
    ours = optim.build([module], settings, Plan(optim=Optim(NAME)))
    optim.set_learning_rate(ours, rate, settings)
    for number in range(STEPS):
        for mine, other in zip(module.parameters(), theirs, strict=True):
            gradient = 0.3**number * torch.randn(mine.shape, dtype=torch.float64)
            other.grad = gradient * (0.5 if scaled else 1.0)
            mine.grad = gradient.clone()
        right.step()
        optim.update(ours, torch.tensor(False), torch.tensor(0.5, dtype=torch.float64) if scaled else None)
        for mine in module.parameters():
            mine.grad = torch.full_like(mine, torch.nan)
        optim.update(ours, torch.tensor(True), None)
    for mine, other in zip(module.parameters(), theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)
        assert float(ours.state[mine]["step"]) == STEPS
    state = ours.state[module["head"].weight]
    assert {key: tuple(value.shape) for key, value in state.items()} == {
        "step": (),
        "row_var": (7, 1),
        "col_var": (1, 5),
    }


def test_what_is_kept_and_sent_is_what_was_planned() -> None:
    """Of each matrix a number a row and a column; two sums a step, where ranks hold rows."""
    for sharding in ("ddp", "zero1", "zero3", "hsdp-zero3"):
        plan = plan_of(sharding, 8, batch=Batch(2, 2, 32, 40), optim=Optim(NAME))
        check(plan, ranks=(7,))
        check(replace(plan, lora=Lora(4, 8.0)), ranks=(7,))
    check(plan_of("zero3", 8, batch=Batch(2, 1, 32, 40), optim=Optim(NAME), precision=Precision("bf16")), ranks=(0,))


LAYOUTS = {"hybrid": with_all("hybrid")[1], "zero3 and stages": with_all("ZeRO-3", "1f1b", "LoRA")[1]}


@pytest.mark.big
@pytest.mark.parametrize("plan", LAYOUTS.values(), ids=LAYOUTS)
def test_it_is_certified(ranks: RankPool, plan: Plan) -> None:
    """Its own steps, under the plan's layout against one process; saved, it goes on under another layout."""
    subject = certify.subject_of(DRAWN, SPEC, replace(plan, optim=Optim(NAME)), 16)
    assert subject.small is not None and subject.small.plan.optim.name == NAME
    checks = [certify.run(subject, proof, 0, ranks) for proof in ("parity", "dtypes", "checkpoint")]
    checks += [
        certify.run(subject, "drift", rank, NoRanks()) for rank in certify.drift_ranks(subject.plan.layout, "quick")
    ]
    assert not [check for check in checks if check.problems]


def test_what_it_cannot_do_is_refused() -> None:
    values = "`optim.beta1: 0.5`", "no effect", "`optim.name: adafactor`"
    with pytest.raises(ConfigError, match=refusal("CFG008", *values)):
        load_recipe(None, ["model=m", "optim.name=adafactor", "optim.beta1=0.5"])
    whole = Plan(optim=Optim(NAME))
    for plan in (replace(whole, layout=Layout(tp=2)), replace(whole, offload=Offload("host"))):
        refused = optim.check(SPEC, plan, None)  # type: ignore[arg-type]
        assert [problem.code for problem in refused] == ["PLAN012"]
    assert not optim.check(SPEC, whole, None)  # type: ignore[arg-type]


def test_a_tied_embedding_is_not_on_two_stages_with_sums_of_their_own() -> None:
    """In float64 on 2 x 3 ranks its copies differed in the last bit after one step."""
    staged = replace(Plan(Layout(dp_shard=3, pp=2)), shard=Shard("zero3"), optim=Optim(NAME))
    adapted = replace(staged, lora=Lora(4, 8.0))
    for plan, tied, count in (
        (staged, True, 1),
        (staged, False, 0),
        (replace(staged, optim=Optim("sgd")), True, 0),
        (replace(staged, layout=Layout(pp=2, dp_replicate=3), shard=Shard("ddp")), True, 0),
        (adapted, True, 0),
        (replace(adapted, lora=Lora(4, 8.0, modules_to_save=("embed", "head"))), True, 1),
    ):
        refused = optim.check(replace(SPEC, tie_word_embeddings=tied), plan, None)  # type: ignore[arg-type]
        assert [problem.code for problem in refused] == ["PLAN012"] * count
