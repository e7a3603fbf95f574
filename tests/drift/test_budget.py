"""What blocks save by a budget, in every eighth of them, is what the plan says: to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.models.config import ModelSpec
from shardwise.planner.sheets import sheet_of
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Pipeline, Plan, Precision, Remat, SavedResult, Scales
from shardwise.techniques.remat import may_save, products_of
from tests.drift.test_drift import PRECISIONS, SPEC, check, plan_of
from tests.drift.test_float8 import SPEC as BLOCKS
from tests.drift.test_lora import ADAPTERS
from tests.parity.mixers import DEEPSEEK, NEXT

DEEP = replace(SPEC, num_hidden_layers=9)
BF16 = PRECISIONS["bf16"]
PARTS = tuple(SavedResult(7, place, eighths) for place, eighths in ((0, 3), (3, 8), (5, 5)))


def spread(spec: ModelSpec, plan: Plan) -> Plan:
    """The plan with every other result saved of each kind of block, in more and more of the blocks."""
    kinds = {products_of(block): len(may_save(block)) for block in sheet_of(spec, plan).blocks}
    saved = (
        SavedResult(products, place, 1 + (3 * place + 2) % 8)
        for products, count in kinds.items()
        for place in range(0, count, 2)
    )
    return replace(plan, remat=Remat("budget", 1, tuple(sorted(saved))))


def test_parts_of_the_blocks() -> None:
    check(plan_of("zero3", 8, precision=BF16, remat=Remat("budget", 1, PARTS)), DEEP)


@pytest.mark.prove
@pytest.mark.parametrize("place", range(7))
def test_each_result_alone(place: int) -> None:
    check(plan_of("zero2", 8, precision=BF16, remat=Remat("budget", 2, (SavedResult(7, place),))), DEEP)


@pytest.mark.prove
@pytest.mark.parametrize("spec", [DEEPSEEK, NEXT], ids=["latents, experts", "delta nets, experts"])
def test_kinds_of_blocks_save_what_is_theirs(spec: ModelSpec) -> None:
    check(spread(spec, plan_of("zero3", 8, precision=BF16)), spec)


@pytest.mark.prove
@pytest.mark.parametrize("what", ADAPTERS)
def test_products_beside_others(what: str) -> None:
    """Adapters are products as well, and count among the places."""
    spec, lora = ADAPTERS[what]
    check(spread(spec, replace(plan_of("zero3", 8, precision=BF16), lora=lora)), spec, ranks=(7,))


@pytest.mark.prove
@pytest.mark.parametrize("scales", ["block", "row", "mx"])
def test_products_in_float8(scales: Scales) -> None:
    precision = Precision("bf16", products="float8", scales=scales, exclude=("first",))
    check(spread(BLOCKS, plan_of("zero3", 8, precision=precision)), BLOCKS, ranks=(7,))


@pytest.mark.prove
def test_stages_and_tensor_parallelism() -> None:
    pipeline = Pipeline("1f1b", 1, (5, 4))
    plan = plan_of("zero3", 8, precision=BF16, pipeline=pipeline, layout=Layout(pp=2, tp=2, dp_shard=2))
    batch = replace(plan.batch, accumulation=4)
    check(replace(plan, batch=batch, remat=Remat("budget", 1, PARTS), sequence_parallel=True), DEEP, (0, 7))
