"""Muon in float64 under every axis, whose matrices are gathered, dealt out and scattered, is that of one process; what
is sent and held is what was planned; runs go on under another layout; faults in any of this are seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise.models.config import ModelSpec, with_fields
from shardwise.prove.drift import drift
from shardwise.prove.pool import RankPool
from shardwise.spec.plan import Optim, Plan, Precision
from shardwise.techniques import optim
from shardwise.techniques.optim import muon
from shardwise.techniques.optim.dealt import Weight
from shardwise.techniques.optim.muon import Exchange
from tests.covering import pairwise
from tests.parity import drawn, planted
from tests.parity.mixtures import MIXTRAL, QWEN2, Case
from tests.parity.moving import goes_on
from tests.parity.pairwise import DENSE
from tests.parity.test_fp64 import holds

STEPS = 3
"""Momentum is of three gradients."""
MODELS = {
    "dense": DENSE,
    "eight experts": replace(QWEN2, name="tiny-eight"),
    "six experts": with_fields(MIXTRAL, name="tiny-six", num_experts=6, expert_size=10),
}
"""Of six experts four ranks that share them have one and a half each."""
AXES = tuple(MODELS), (1, 2), ("ddp", "zero1", "zero2", "zero3", "hsdp"), (1, 2), (1, 2), (1, 2)


def plan_of(model: str, ep: int, strategy: str, tp: int, pp: int, alike: int) -> Plan | None:
    """None where there is no such layout on eight ranks; ``alike`` as of mixtures."""
    case = Case("Mixtral", ep, strategy, tp, pp, 1, "none", pp, alike)
    if case.layout is None or (model == "dense" and ep > 1):
        return None
    return replace(case.plan, optim=Optim("muon"))


CASES = pairwise(*AXES, legal=lambda *case: plan_of(*case) is not None)
FEW = [case for case in CASES if plan_of(*case).layout.world <= 4]  # type: ignore[union-attr]
MANY = [case for case in CASES if case not in FEW]


def planned(case: Sequence[Any]) -> tuple[ModelSpec, Plan]:
    found = plan_of(*case)
    assert found is not None
    return MODELS[case[0]], found


@pytest.mark.matrix(5)
@pytest.mark.parametrize("case", FEW, ids=str)
def test_up_to_four_ranks(ranks: RankPool, case: tuple[Any, ...]) -> None:
    spec, plan = planned(case)
    holds(drawn.prove(ranks, spec, [plan], STEPS), [plan])


@pytest.mark.big
@pytest.mark.timeout(600)
def test_eight_ranks(eight: RankPool) -> None:
    for case in MANY:
        spec, plan = planned(case)
        holds(drawn.prove(eight, spec, [plan], STEPS), [plan])


@pytest.mark.matrix(4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_sent_and_held_is_what_was_planned(case: tuple[Any, ...]) -> None:
    spec, plan = planned(case)
    for rank in {0, plan.layout.world - 1}:
        found = drift(spec, replace(plan, precision=Precision("bf16")), rank)
        assert not found.differences(), f"rank {rank} of {plan}"


@pytest.mark.prove
def test_a_run_goes_on_under_another_layout(ranks: RankPool, tmp_path: Path) -> None:
    """Momentum too, bit by bit, of experts that are cut and whole."""
    cases = [("ep", 2, "zero3", 1, 1, 2), ("tp", 1, "zero1", 2, 1, 2), ("hsdp", 1, "hsdp", 1, 1, 2)]
    cases += [("stages", 1, "zero3", 1, 2, 2), ("ddp", 1, "ddp", 1, 1, 2)]
    source, *targets = [plan for _, *case in cases if (plan := plan_of("six experts", *case))]
    assert len(targets) == 4
    saved = goes_on(ranks, tmp_path, MODELS["six experts"], source, targets)
    assert sum("momentum_buffer" in name for name in saved) == 2 * 7


# Faults --------------------------------------------------------------------------------------------------------------

gather, scatter, direction = Exchange._gathered, Exchange._scattered, muon.Muon._direction
orthogonalise, weight_of = muon._orthogonalised, optim.weight_of


def as_slices(self: Exchange, pieces: Sequence[Tensor]) -> list[Tensor]:
    """Of a matrix each rank orthogonalises what it has."""
    return orthogonalise(pieces)


def to_the_next_rank(self: Exchange, wholes: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    ranks, self.ranks = self.ranks, (*self.ranks[1:], *self.ranks[:1])
    found = scatter(self, wholes, like)
    self.ranks = ranks
    return found


def pieces_the_wrong_way_round(self: Exchange, pieces: Sequence[Tensor]) -> list[Tensor]:
    return [whole.roll(whole.shape[0] // 2, 0) for whole in gather(self, pieces)]


def with_its_neighbour(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Two matrices of one shape that follow each other are taken for one."""
    found = orthogonalise(matrices)
    for i in range(len(matrices) - 1):
        if matrices[i].shape == matrices[i + 1].shape:
            found[i : i + 2] = orthogonalise([torch.cat([matrices[i], matrices[i + 1]])])[0].chunk(2)
    return found


def all_experts_as_one(shape: Sequence[int], stack: int, *more: Any) -> Weight:
    return weight_of(shape, 1, *more)


def without_new_gradient(self: muon.Muon, *which: int) -> Tensor:
    """The momentum as it was before the step."""
    kept = self._part(self.state[self.own[which[0]].parameter][muon.MOMENTUM], *which).clone()
    direction(self, *which)
    return kept.to(self.dtype)


def planting(of: Any, name: str, fault: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: patch.object(of, name, fault)


ZERO3, EXPERTS = planned(("dense", 1, "zero3", 1, 1, 2)), planned(("eight experts", 1, "zero3", 1, 1, 2))
FAULTS: dict[str, planted.Fault] = {
    "what a rank has orthogonalised by itself": (planting(Exchange, "results", as_slices), *ZERO3),
    "results of the next rank's rows": (planting(Exchange, "_scattered", to_the_next_rank), *ZERO3),
    "pieces the wrong way round": (planting(Exchange, "_gathered", pieces_the_wrong_way_round), *ZERO3),
    "the momentum of the step before": (planting(muon.Muon, "_direction", without_new_gradient), *ZERO3),
    "an expert with its neighbour": (planting(muon, "_orthogonalised", with_its_neighbour), *EXPERTS),
    "all experts as one matrix": (planting(optim, "weight_of", all_experts_as_one), *EXPERTS),
}


def on_rank(rank: int, world: int) -> list[Any]:
    return planted.take_steps(rank, [*FAULTS.values()])


def test_faults_are_seen(ranks: RankPool) -> None:
    planted.all_seen(FAULTS, ranks.run(on_rank, world=2))
