"""What is reported of tokens: with entropies too, what a plan sends, holds and saves is what was predicted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from shardwise.models.config import model_spec
from shardwise.planner.price import price
from shardwise.prove.drift import PEAK_FROM_BYTES, drift
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Pipeline, Plan, Precision, Shard
from tests.drift.test_drift import SPEC, check

LAYOUTS = {
    "tp": (Layout(tp=2), Plan()),
    "tp and zero3": (Layout(dp_shard=2, tp=2), Plan(shard=Shard("zero3"), sequence_parallel=True)),
    "cp": (Layout(cp=2), Plan()),
    "pp": (Layout(pp=2), Plan(pipeline=Pipeline("1f1b", split=(1, 1)))),
    "zero1": (Layout(dp_shard=4), Plan(shard=Shard("zero1"))),
}


@pytest.mark.parametrize("cap", [None, 4.0])
@pytest.mark.parametrize("name", LAYOUTS)
def test_entropies_under_every_kind_of_layout(name: str, cap: float | None) -> None:
    of, settings = LAYOUTS[name]
    for dtype in ("fp32", "bf16"):
        plan = replace(settings, layout=of, batch=Batch(2, 2, 32, 40), precision=Precision(dtype), entropy=True)  # type: ignore[arg-type]
        check(plan, replace(SPEC, final_soft_cap=cap), ranks=(0, of.world - 1))


@pytest.mark.parametrize("of", [Layout(dp_shard=8), Layout(tp=8)], ids=str)
def test_the_peak_of_a_large_model(of: Layout) -> None:
    """Above 1 GiB, where the peak too is among the differences when it is not within 3 %: of the last stage, whose loss
    is its peak."""
    spec = model_spec("large", 64_000, 2048, 2048, 2, 16, 8, 128)
    plan = Plan(of, Batch(2, 1, 4096, 8192), Shard("zero3"), Precision("bf16"), entropy=True)
    found = drift(spec, plan, 0)
    assert found.measured.peak_bytes >= PEAK_FROM_BYTES and not found.differences()


def test_what_entropies_cost() -> None:
    """8 bytes with the loss, and four bytes a token of each rank in the loss of each micro-batch."""
    plan = Plan(Layout(dp_shard=4, tp=2), Batch(2, 3, 32, 40), Shard("zero3"), Precision("bf16"))
    bare, told = (price(SPEC, each, parse_cluster("8xH100")).estimate for each in (plan, replace(plan, entropy=True)))
    more = Counter({(each.axis, each.kind): each.bytes for each in told.traffic})
    more.subtract({(each.axis, each.kind): each.bytes for each in bare.traffic})
    assert +more == {("world", "all_reduce"): 8, ("tp", "all_gather"): 3 * 2 * 4 * 2 * 32}
