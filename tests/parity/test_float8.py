"""Products in float8 under every layout, in float64: what one process computes by a rule of its own
(prove/plain_linear.py), to the tolerance of everything else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardwise import techniques
from shardwise.models.config import ModelSpec, with_fields
from shardwise.prove import parity
from shardwise.prove.pool import RankPool
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.plan import Lora, Plan
from shardwise.techniques import float8
from shardwise.techniques.float8 import scaled
from tests.covering import pairwise
from tests.parity import drawn
from tests.parity.float8s import ADAPTERS, EXPERTS, FLOAT8, LAYOUTS, MX, ROW, SPEC, SPREAD, legal, plan_of, spec_of
from tests.parity.test_fp64 import holds

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
REMATS = ("none", "selective", "full")
TRAINED: dict[str, Lora | None] = {"all": None, "adapters": ADAPTERS, "magnitudes": replace(ADAPTERS, dora=True)}
CASES = pairwise(LAYOUTS, STRATEGIES, REMATS, (1, 2), TRAINED, legal=legal)

PRECISIONS = {
    "block": FLOAT8,
    "row": ROW,
    "mx": MX,
    "experts alone": replace(FLOAT8, exclude=("*.attention.*", "*.expert_up")),
}
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


@pytest.mark.matrix
@pytest.mark.parametrize("trained", ["all", "adapters"])
def test_blocks_of_mx(ranks: RankPool, trained: str) -> None:
    """Of a model that two ranks could not have in whole blocks of 128."""
    spec = with_fields(SPEC, head_dim=96, num_attention_heads=2, num_key_value_heads=2)
    plans = [
        plan_of("shards", "zero3", "selective", 2, TRAINED[trained], precision=MX),
        plan_of("tp", "ddp", "none", 1, TRAINED[trained], precision=MX),
    ]
    assert all(allowed(spec, plan) for plan in plans)
    assert not allowed(spec, replace(plans[1], precision=FLOAT8))
    holds(drawn.prove(ranks, spec, plans), plans)


def test_it_is_another_computation_than_without() -> None:
    """Else nothing would be shown: losses differ by a hundredth, gradients by a fifth and more."""
    right, found = (
        drawn.plain(parity.job_of(SPEC, replace(plan_of("one"), precision=each), 1))
        for each in (replace(FLOAT8, products="compute", exclude=()), FLOAT8)
    )
    apart = parity.compare(right, [found])
    assert 1e-4 < apart.loss.error < 0.1 and 0.1 < apart.gradient.error < 1


def test_what_is_not_finite_stays_so() -> None:
    """Codes have no infinity: the whole row is none of a number, and a step is skipped."""
    for value in (torch.inf, torch.nan):
        x = torch.randn(3, 256)
        x[1, 7] = value
        out = scaled.linear(x, torch.randn(128, 256), scaled.Scaling("block"))
        assert out[1].isnan().all() and out[[0, 2]].isfinite().all()
