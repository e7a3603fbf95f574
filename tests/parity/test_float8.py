"""Products in float8 under every layout, in float64: what one process computes by a rule of its own
(prove/plain_linear.py), to the tolerance of everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwise import techniques
from shardwise.models.config import ModelSpec
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.plan import Lora, Plan
from shardwise.techniques import float8
from shardwise.techniques.float8 import codes, scaled
from tests.covering import pairwise
from tests.parity import drawn
from tests.parity.float8s import ADAPTERS, EXPERTS, FLOAT8, LAYOUTS, ROW, SPEC, SPREAD, legal, plan_of, spec_of
from tests.parity.test_fp64 import holds

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
REMATS = ("none", "selective", "full")
TRAINED: dict[str, Lora | None] = {"all": None, "adapters": ADAPTERS, "magnitudes": replace(ADAPTERS, dora=True)}
CASES = pairwise(LAYOUTS, STRATEGIES, REMATS, (1, 2), TRAINED, legal=legal)

PRECISIONS = {"block": FLOAT8, "row": ROW, "experts alone": replace(FLOAT8, exclude=("*.attention.*", "*.expert_up"))}
MIXTURES = pairwise(
    SPREAD, STRATEGIES, REMATS, (1, 2), ("all", "adapters"), PRECISIONS, legal=lambda *case: legal(*case[:4])
)


def allowed(spec: ModelSpec, plan: Plan) -> bool:
    return not techniques.check(spec, plan, parse_cluster(f"{plan.layout.world}xCPU"))


@pytest.mark.matrix(40)
@pytest.mark.parametrize(("layout", "strategy", "remat", "accumulation", "trained"), CASES)
def test_every_layout(ranks: RankPool, layout: str, strategy: str, remat: str, accumulation: int, trained: str) -> None:
    plan = plan_of(layout, strategy, remat, accumulation, TRAINED[trained])
    spec = spec_of(plan.lora)
    assert allowed(spec, plan)
    holds(drawn.prove(ranks, spec, [plan]), [plan])


@pytest.mark.matrix(40)
@pytest.mark.parametrize(("layout", "strategy", "remat", "accumulation", "trained", "precision"), MIXTURES)
def test_experts(
    ranks: RankPool, layout: str, strategy: str, remat: str, accumulation: int, trained: str, precision: str
) -> None:
    plan = plan_of(layout, strategy, remat, accumulation, TRAINED[trained], precision=PRECISIONS[precision])
    assert allowed(EXPERTS, plan) and any(".experts." in name for name in float8.layers(EXPERTS, plan.precision))
    holds(drawn.prove(ranks, EXPERTS, [plan]), [plan])


@pytest.mark.prove
def test_scales_of_rows(ranks: RankPool) -> None:
    plans = [plan_of("shards", "zero3", "selective", 2, precision=ROW), plan_of("dp", precision=ROW)]
    assert all(allowed(SPEC, plan) for plan in plans)
    holds(drawn.prove(ranks, SPEC, plans), plans)


def test_it_is_another_computation_than_without() -> None:
    """Else nothing would be shown: losses differ by a hundredth, gradients by a fifth and more."""
    right, found = (
        drawn.plain(parity.job_of(SPEC, replace(plan_of("one"), precision=each), 1))
        for each in (replace(FLOAT8, products="compute", exclude=()), FLOAT8)
    )
    apart = parity.compare(right, [found])
    assert 1e-4 < apart.loss.error < 0.1 and 0.1 < apart.gradient.error < 1


# Planted faults ------------------------------------------------------------------------------------------------------


VALUES = codes.CodedMatrix.values


def of_neighbours(self: codes.CodedMatrix, dtype: torch.dtype) -> Tensor:
    """What the codes stand for with the scales of the blocks beside theirs."""
    return VALUES(replace(self, scales=self.scales.roll(1, 1)), dtype)


def with_fault(rank: int, world: int, fault: str, spec: ModelSpec, plans: Sequence[Plan]) -> list[parity.Trace]:
    faults: dict[str, Any] = {
        "a neighbour's scale": patch.object(codes.CodedMatrix, "values", of_neighbours),
        "local maxima": patch.object(scaled, "_greatest", lambda exponents, group: exponents),
        "none": patch.object(scaled, "FLOAT8_BLOCK", scaled.FLOAT8_BLOCK),
    }
    with faults[fault]:
        return drawn.train_on_rank(rank, world, spec, plans, 1)


@pytest.mark.parametrize(("fault", "least"), [("none", 0.0), ("a neighbour's scale", 1e-2)])
def test_a_neighbours_scale_is_seen(ranks: RankPool, fault: str, least: float) -> None:
    plan = plan_of("one")
    [[trace]] = ranks.run(with_fault, fault, SPEC, [plan], world=1)
    found = parity.compare(drawn.plain(parity.job_of(SPEC, plan, 1)), [trace])
    assert found.gradient.error > least and (fault != "none" or found.gradient.error < 1e-9)


@pytest.mark.prove
def test_local_maxima_are_seen(ranks: RankPool) -> None:
    """Of the part of a row that a rank has, as nobody should take under tensor parallelism."""
    plan = plan_of("tp", precision=ROW)
    traces = ranks.run(with_fault, "local maxima", SPEC, [plan], world=2)
    found = parity.compare(drawn.plain(parity.job_of(SPEC, plan, 1)), [trace for [trace] in traces])
    assert found.gradient.error > 1e-6


@pytest.mark.prove
def test_a_cut_within_a_block_is_refused_and_cannot_be_computed(ranks: RankPool) -> None:
    plan = plan_of("tp")
    narrow = replace(SPEC, intermediate_size=128, intermediate_sizes=())
    assert not allowed(narrow, plan)
    with pytest.raises(Exception, match="whole blocks"):
        ranks.run(drawn.train_on_rank, narrow, [plan], 1, world=2)


def test_what_is_not_finite_stays_so() -> None:
    """Codes have no infinity: the whole row is none of a number, and a step is skipped."""
    for value in (torch.inf, torch.nan):
        x = torch.randn(3, 256)
        x[1, 7] = value
        out = scaled.linear(x, torch.randn(128, 256), scaled.How("block"))
        assert out[1].isnan().all() and out[[0, 2]].isfinite().all()
