"""Weights that zero3 gathers as codes of float8: to the bit what they are without, in every dtype; and in float64 what
one process computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise import techniques
from shardwise.models.config import ModelSpec
from shardwise.prove import certify, moves, parity
from shardwise.prove.pool import RankPool
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.plan import Lora, Plan, Precision
from shardwise.techniques.float8 import codes
from tests.covering import pairwise
from tests.parity import drawn
from tests.parity.float8s import ADAPTERS, EVERY, EXPERTS, FLOAT8, SPEC, plan_of, spec_of
from tests.parity.test_fp64 import holds
from tests.prove.test_pairs import subject_of

STEPS = 3
HALF = Precision("bf16", products="float8", exclude=("first",))
PRECISIONS = {
    "bf16": HALF,
    "bf16 weights": replace(HALF, weights="bf16", exclude=()),
    "fp32": replace(HALF, compute="fp32", exclude=("*.down",)),
    "fp64": FLOAT8,
}
GATHERED = ("shards", "hsdp", "tp, sequence", "cp", "stages of shards")
KEPT = (True, False)
"""Whether weights are gathered again for backward."""


def planned(layout: str, remat: str, accumulation: int, precision: str, trained: str, again: bool) -> Plan:
    own = PRECISIONS[precision]
    lora: Lora | None = replace(ADAPTERS, frozen=own.compute) if trained == "adapters" else None
    plan = plan_of(layout, "zero3", remat, accumulation, lora, precision=own)
    return replace(plan, shard=replace(plan.shard, reshard_after_forward=again))


def narrow(plan: Plan) -> Plan:
    return replace(plan, precision=replace(plan.precision, gather="float8"))


def row(
    layout: str, remat: str, accumulation: int, precision: str, trained: str, again: bool
) -> tuple[ModelSpec, Plan]:
    plan = planned(layout, remat, accumulation, precision, trained, again)
    return spec_of(plan.lora), narrow(plan)


SPREAD = ("shards", "ep, shards")


def of_experts(layout: str) -> Plan:
    return narrow(plan_of(layout, "zero3", "none", 2, precision=HALF))


CASES = pairwise(
    GATHERED,
    ("none", "selective", "full"),
    (1, 2),
    PRECISIONS,
    ("all", "adapters"),
    KEPT,
    legal=lambda layout, remat, accumulation, *rest: accumulation >= EVERY[layout][0].pp,
)


def train(rank: int, world: int, spec: ModelSpec, plans: Sequence[Plan]) -> list[tuple[parity.Trace, int]]:
    """Of each plan three steps, and how many weights were made of codes: of compiled plans, in compiled functions, as
    on a GPU."""
    found = []
    own = codes.WeightCodes.values
    for plan in plans:
        made = list[int]()

        def counted(*given: Any, made: list[int] = made) -> Tensor:
            made.append(1)
            return own(*given)

        with (
            patch.object(codes.WeightCodes, "values", counted),
            patch.object(codes, "has_kernels", lambda tensor: True),
            patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")),
        ):
            found.append((drawn.take_steps(rank, spec, plan, STEPS), len(made)))
    return found


def identical(ranks: RankPool, spec: ModelSpec, plan: Plan) -> bool:
    """Whether losses, gradients and weights are, to the bit, those of the same plan whose weights are gathered in the
    dtype of compute."""
    assert not techniques.check(spec, plan, parse_cluster(f"{plan.layout.world}xCPU"))
    wide = replace(plan, precision=replace(plan.precision, gather="compute"))
    for (right, none), (found, some) in ranks.run(train, spec, [wide, plan], world=plan.layout.world):
        assert none == 0 and some > 0
        same = right.losses == found.losses and right.norms == found.norms
        for own, other in ((right.gradients, found.gradients), (right.weights, found.weights)):
            same &= own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)
        if not same:
            return False
    return True


@pytest.mark.matrix(20)
@pytest.mark.parametrize(("layout", "remat", "accumulation", "precision", "trained", "again"), CASES)
def test_it_changes_no_bit(
    ranks: RankPool, layout: str, remat: str, accumulation: int, precision: str, trained: str, again: bool
) -> None:
    assert identical(ranks, *row(layout, remat, accumulation, precision, trained, again))


@pytest.mark.prove
@pytest.mark.parametrize("layout", SPREAD)
def test_experts(ranks: RankPool, layout: str) -> None:
    """A matrix of several experts, of which each rank has some."""
    assert identical(ranks, EXPERTS, of_experts(layout))


COMPILED = replace(narrow(planned("shards", "selective", 1, "bf16", "all", True)), compile=True)


@pytest.mark.big
def test_compiled_blocks(ranks: RankPool) -> None:
    assert identical(ranks, spec_of(None), COMPILED)


@pytest.mark.prove
def test_it_is_what_one_process_computes(ranks: RankPool) -> None:
    plans = [narrow(planned(layout, "selective", 2, "fp64", "all", True)) for layout in ("hsdp", "tp, sequence")]
    spec = spec_of(None)
    holds(drawn.prove(ranks, spec, plans), plans)


@pytest.mark.prove
def test_a_certificate_holds_and_a_saved_run_goes_on_without(ranks: RankPool) -> None:
    """And the other way round: no checkpoint knows how weights are gathered."""
    subject = subject_of(("codes", "accumulation"))
    assert subject.small is not None and not subject.lost and subject.small.plan.precision.gather == "float8"
    assert moves.elsewhere(subject.small.plan).precision.gather == "compute"
    for proof in ("checkpoint", "dtypes"):
        assert not certify.run(subject, proof, 0, ranks).problems


def of_the_shard(self: codes.WeightCodes, shard: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Coded with one scale for all that a rank has."""
    exponents = codes.exponents_of(shard.to(dtype), 128, 128)
    made = codes.coded(shard.to(dtype), 128, 128, exponents=torch.full_like(exponents, int(exponents.max())))
    return made.codes.view(torch.uint8), made.scales


def of_the_masters(self: codes.WeightCodes, shard: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Coded without being rounded first to what it is multiplied in."""
    made = codes.coded(shard, 128, 128)
    return made.codes.view(torch.uint8), made.scales


FAULTS = {"one scale for a shard": of_the_shard, "codes of the masters": of_the_masters}


def train_with_fault(rank: int, world: int, name: str, plan: Plan) -> list[tuple[parity.Trace, int]]:
    with patch.object(codes.WeightCodes, "sent", FAULTS[name]):
        return train(rank, world, SPEC, [narrow(plan)])


@pytest.mark.prove
def test_planted_faults_change_some(ranks: RankPool) -> None:
    plan = planned("shards", "none", 1, "bf16", "all", True)
    [(right, _)], *_ = ranks.run(train, SPEC, [plan], world=2)
    for name in FAULTS:
        [(found, _)], *_ = ranks.run(train_with_fault, name, plan, world=2)
        assert found.losses != right.losses, name
