"""The proof of what a recipe asks for: every schedule and warm-up, every method of pairs; faults planted into the run's
rates, its optimizer or a method are seen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.methods import dpo, hinge, ipo, orpo, pairs, simpo
from shardwise.methods.pairs import Answers
from shardwise.prove import asked, parity
from shardwise.prove.asked import Requested
from shardwise.prove.pool import RankPool
from shardwise.prove.workload import OPTIM, Setting, optim_of, random_everywhere
from shardwise.spec.methods import METHODS
from shardwise.spec.plan import Batch, Optim, Plan, Precision
from shardwise.spec.recipe import Method, OptimSection, ParameterGroup
from shardwise.spec.schedules import SCHEDULES, WARMUPS
from shardwise.techniques import optim
from shardwise.techniques.frozen_float8 import eightbit
from shardwise.techniques.nf4 import fourbit
from shardwise.techniques.optim import adamw, lion
from tests.parity.cases import UNTIED
from tests.prove.faulty_ranks import FaultyRanks

LOW = {"min_learning_rate": 1e-5}
VARIED: list[dict[str, Any]] = [
    {},
    LOW,
    {"decay_steps": 30} | LOW,
    {"warmup_from": 0.0},
    {"warmup_from": 1e-5, "warmup_delay": 5},
    {"decay_steps": 12.5},
]
UNLIKE = {"wsd_exponential"}, {"log", "quadratic"}
"""Schedules and warm-ups of which transformers has none."""
COMPARED = [name for name, method in METHODS.items() if method.pairs]


def found(section: OptimSection, method: Method | None = None, steps: int = 100) -> list[str]:
    return list(asked.prove(Requested(section, method or Method(), steps), {}))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_are_transformers(schedule: str) -> None:
    power: dict[str, Any] = {"power": 2.0} if schedule == "polynomial" else {}
    for shape in WARMUPS:
        for number, varied in enumerate(VARIED):
            warmup = (0, 1, 7, 0.1)[(number + len(shape)) % 4]
            section = OptimSection(schedule=schedule, warmup_steps=warmup, warmup_shape=shape, **power, **varied)
            assert not found(section), section
            told: dict[str, float] = {}
            list(asked.prove(Requested(section, Method(), 100), told))
            known = Requested(section, Method(), 100)
            assert ((known.fall() is None), (known.rise() is None)) == (schedule in UNLIKE[0], shape in UNLIKE[1])
            steps = (0 if schedule in UNLIKE[0] else 80) + (0 if shape in UNLIKE[1] else known.warmup)
            assert told["steps"] >= steps


def test_of_a_long_run_the_ends_are_looked_at() -> None:
    told: dict[str, float] = {}
    section = OptimSection(schedule="wsd", warmup_steps=2_000, min_learning_rate=1e-5)
    assert not list(asked.prove(Requested(section, Method(), 1_000_003), told))
    assert 500 <= told["steps"] <= 600


@pytest.mark.parametrize("name", COMPARED)
def test_answers_are_pulled_apart(name: str) -> None:
    assert not found(OptimSection(), Method(name=name))


rate = optim.learning_rate


def a_step_late(section: OptimSection, step: int, steps: int) -> float:
    return rate(section, max(0, step - 1), steps)


def of_another_length(section: OptimSection, step: int, steps: int) -> float:
    return rate(section, step, steps - 1)


def to_nothing(section: OptimSection, step: int, steps: int) -> float:
    return rate(section.model_copy(update={"min_learning_rate": 0.0}), step, steps)


def warm_at_once(section: OptimSection, step: int, steps: int) -> float:
    return rate(section.model_copy(update={"warmup_steps": 0}), step, steps)


def shares_rounded_down(section: OptimSection, step: int, steps: int) -> float:
    return rate(section.model_copy(update={"warmup_steps": int(section.warmup_steps * steps)}), step, steps)


RATES = {
    "rates are a step late": a_step_late,
    "the run is taken to be a step shorter": of_another_length,
    "rates fall to 0, whatever the lowest is": to_nothing,
    "there is no warm-up": warm_at_once,
    "a warm-up of a share of the run is rounded down": shares_rounded_down,
}


@pytest.mark.parametrize("name", RATES)
def test_another_rate_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "learning_rate", RATES[name])
    [line] = found(OptimSection(warmup_steps=0.05, min_learning_rate=1e-5), steps=1_010)
    assert line.startswith("learning rate of ")


def added(self: Answers) -> Tensor:
    chosen, rejected = (self.logps + self.references).unbind(1)
    return chosen - rejected


def of_other_rewards(answers: Answers, method: Method) -> Tensor:
    return figures(replace(answers, references=-answers.references), method)


def ahead_by_one(answers: Answers, method: Method) -> Tensor:
    told = figures(answers, method)
    told[3] = (told[2] > 1).double()
    return told


figures = pairs.figures
PULLS: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]], str]] = {
    "DPO adds what the initial model says": (
        "dpo",
        lambda: patch.object(Answers, "margins", property(added)),
        "changes the loss",
    ),
    "rewards are of the sum with the reference": (
        "dpo",
        lambda: patch.object(asked, "figures", of_other_rewards),
        "rewards/chosen",
    ),
    "a pair counts as right from a margin of 1": (
        "ipo",
        lambda: patch.object(asked, "figures", ahead_by_one),
        "accuracies",
    ),
    "IPO is drawn to the other side": (
        "ipo",
        lambda: patch.object(ipo, "losses", lambda a, m: (a.means.margins + 1 / (2 * m.beta)).square()),
        "less likely",
    ),
    "SimPO prefers what was rejected": (
        "simpo",
        lambda: patch.object(simpo, "losses", lambda a, m: pairs.smoothed(-m.beta * a.means.margins, m)),
        "less likely",
    ),
    "ORPO unlearns the chosen answer": (
        "orpo",
        lambda: patch.object(orpo, "losses", lambda a, m: a.means.logps[:, 0]),
        "less likely",
    ),
    "the hinge opens the other way": (
        "hinge",
        lambda: patch.object(hinge, "losses", lambda a, m: (1 + m.beta * a.margins).relu()),
        "less likely",
    ),
    "DPO with a negative beta": (
        "dpo",
        lambda: patch.object(dpo, "losses", lambda a, m: pairs.smoothed(-m.beta * a.margins, m)),
        "less likely",
    ),
}


@pytest.mark.parametrize("name", PULLS)
def test_another_pull_is_seen(name: str) -> None:
    method, planted, said = PULLS[name]
    with planted():
        lines = found(OptimSection(), Method(name=method))
    assert any(said in line for line in lines), lines


def test_what_a_method_of_a_package_means_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may unlearn what was rejected by unlearning both."""
    monkeypatch.setattr(simpo, "losses", lambda a, m: pairs.smoothed(-m.beta * a.means.margins, m))
    row = replace(METHODS["simpo"], module="shardwise.methods.simpo")
    assert found(OptimSection(), Method(name="simpo"))
    monkeypatch.setitem(METHODS, "simpo", row)
    assert not found(OptimSection(), Method(name="simpo"))


def test_rates_where_a_fall_begins_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long run: the first step of the fall has the rate of the second."""
    early = OptimSection(schedule="wsd", decay_steps=300)
    monkeypatch.setattr(asked, "learning_rate", lambda o, step, n: rate(o, step + (step == n - 300), n))
    assert found(early, steps=100_003)


quantise, coded = fourbit.quantise, eightbit.coded


def shifted_too_far(matrix: Tensor) -> Any:
    codes, *rest = quantise(matrix)
    return codes << 1, *rest


def of_another_block(matrix: Tensor) -> Any:
    codes, scales, groups = quantise(matrix)
    return codes, scales.roll(1, 1), groups


def of_the_neighbour(matrix: Tensor) -> Any:
    codes, scales = coded(matrix)
    return eightbit.KeptCodes(codes, scales.roll(1, 0))


def one_code_on(matrix: Tensor) -> Any:
    codes, scales = coded(matrix)
    return eightbit.KeptCodes(codes + (codes % 8 < 7), scales)


@pytest.mark.parametrize("wrong", [None, shifted_too_far, of_another_block])
def test_weights_in_other_bits_are_seen(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fourbit, "quantise", wrong or quantise)
    lines = list(asked.prove(Requested(OptimSection(), Method(), 10, codes="nf4"), {}))
    assert [line[:17] for line in lines] == ["weights in 4 bits"] * (wrong is not None)


@pytest.mark.parametrize("wrong", [None, of_the_neighbour, one_code_on])
def test_weights_in_other_codes_are_seen(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eightbit, "coded", wrong or coded)
    lines = list(asked.prove(Requested(OptimSection(), Method(), 10, codes="float8"), {}))
    assert [line[:17] for line in lines] == ["weights in float8"] * (wrong is not None)


GROUPS = [ParameterGroup(pattern="embed.*", learning_rate=1e-5, weight_decay=0.0), ParameterGroup(pattern="*norm*")]
SECTION = OptimSection(learning_rate=1e-4, beta1=0.85, beta2=0.99, eps=1e-6, weight_decay=0.02, groups=GROUPS)


def test_what_is_asked_for_is_what_proofs_train_with() -> None:
    made = optim_of(SECTION)
    assert (made.beta1, made.beta2, made.eps, made.weight_decay) == (0.85, 0.99, 1e-6, 0.02)
    assert [group.learning_rate for group in made.groups] == [pytest.approx(1e-3), None]
    assert (made.learning_rate, made.schedule, made.max_grad_norm) == (1e-2, "linear", 0.5)
    assert optim_of(OptimSection()) == OPTIM and optim_of(OptimSection(weight_decay=0, eps=1e-20)) == OPTIM


def with_other_betas(groups: Any, section: OptimSection, plan: Plan, seed: int) -> Optimizer:
    return built(groups, OptimSection(eps=section.eps), plan, seed)


def without_eps(groups: Any, section: OptimSection, plan: Plan, seed: int) -> Optimizer:
    return built(groups, section.model_copy(update={"eps": 1e-8}), plan, seed)


def of_no_group(name: str, section: OptimSection) -> optim.Settings:
    return settings(name, section.model_copy(update={"groups": []}))


def of_the_last_group(name: str, section: OptimSection) -> optim.Settings:
    other = [ParameterGroup(pattern="*", weight_decay=0.0), *section.groups]
    return settings(name, section.model_copy(update={"groups": other}))


def with_the_other_beta(self: lion.Lion, grad: Tensor, group: Any, weight: Tensor, *kept: Tensor) -> Any:
    return moved(self, grad, group | {"betas": group["betas"][::-1]}, weight, *kept)


built, settings, moved = adamw.build, optim.settings, lion.Lion.updated
NUMBERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "betas are the usual ones, whatever is asked for": lambda: patch.object(adamw, "build", with_other_betas),
    "eps is the usual one": lambda: patch.object(adamw, "build", without_eps),
    "groups of the recipe are not there": lambda: patch.object(optim, "settings", of_no_group),
    "a group takes what an earlier one has": lambda: patch.object(optim, "settings", of_the_last_group),
    "Lion's betas change places": lambda: patch.object(lion.Lion, "updated", with_the_other_beta),
}


def planted(rank: int, world: int, name: str, work: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    with NUMBERS[name]():
        return work(rank, world, *given)


@pytest.mark.prove
@pytest.mark.parametrize("name", ["", *NUMBERS])
def test_other_numbers_of_the_optimizer_are_seen(ranks: RankPool, name: str) -> None:
    row = Optim("lion" if "Lion" in name else "adamw")
    plan = Plan(batch=Batch(2, 1, 12), precision=Precision("fp64", "fp64"), optim=row)
    setting = Setting(draw=random_everywhere, optim=optim_of(SECTION))
    pool = FaultyRanks(ranks, name, planted) if name else ranks
    [compared] = parity.prove(pool, UNTIED, [plan], 3, setting)
    lines = compared.wrong(parity.TOLERANCE)
    assert bool(lines) == bool(name), lines


def test_the_plain_lion_is_the_papers() -> None:
    """Of one weight, by hand. After a gradient of 1 the mean is 0.01, and 0.9 of it and 0.1 of -0.5 are below 0."""
    weight = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    section = OptimSection(learning_rate=0.1, beta1=0.9, beta2=0.99)
    plain = lion.plain([{"params": [weight], "weight_decay": 0.5}], section)
    for grad, expected in ((1.0, 2 - 0.1 * (1 + 0.5 * 2)), (-0.5, 1.8 - 0.1 * (-1 + 0.5 * 1.8))):
        weight.grad = torch.full_like(weight, grad)
        plain.step()
        assert float(weight.detach()) == pytest.approx(expected, rel=1e-12)
