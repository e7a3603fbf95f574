"""Products in float8: what ranks send, hold and save, to the byte, beside every setting that they meet; nothing of it
is more than without."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from shardwise import techniques
from shardwise.models.config import model_spec, with_fields
from shardwise.planner.schedule import folded
from shardwise.planner.sheets import sheet_of
from shardwise.prove.drift import drift
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Pipeline, Plan, Precision, Remat, Shard
from shardwise.spec.sheet import SCALED
from tests.covering import pairwise

SPEC = model_spec("drift-float8", 601, 256, 512, 4, 4, 2, 128)
"""Of which two ranks have whole blocks of everything."""
BF16 = Precision("bf16", products="float8", exclude=("first", "last"))
PRECISIONS = {
    "ends in bf16": BF16,
    "all": replace(BF16, exclude=()),
    "all but some": replace(BF16, exclude=("*.down", "layers.1.attention.*")),
    "fp32": Precision("fp32", products="float8", exclude=("first",)),
    "rows": Precision("bf16", products="float8", scales="row"),
}
SHARDINGS: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "ddp over 2": ("ddp", Layout(dp_replicate=2), {}),
    "zero1 over 2": ("zero1", Layout(dp_shard=2), {}),
    "zero2 over 2 x 2": ("zero2", Layout(dp_replicate=2, dp_shard=2), {}),
    "zero3 over 4": ("zero3", Layout(dp_shard=4), {}),
    "tp": ("ddp", Layout(tp=2), {}),
    "tp, sequence": ("zero3", Layout(dp_shard=2, tp=2), {"sequence_parallel": True}),
    "pp": ("zero1", Layout(dp_shard=2, pp=2), {"pipeline": Pipeline("1f1b", 1, (2, 2))}),
    "cp": ("zero3", Layout(dp_shard=1, cp=2), {}),
}
MIXTURE = with_fields(
    SPEC,
    num_experts=4,
    experts_per_token=2,
    expert_size=128,
    expert_bias=True,
    shared_expert_size=256,
    dense_layers=(1,),
)
SPREAD: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "tp": SHARDINGS["tp"],
    "ep": ("zero3", Layout(dp_shard=2, ep=2), {}),
    "ep, replicas": ("zero2", Layout(dp_replicate=2, dp_shard=2, ep=2), {}),
    "ep, tp": ("zero1", Layout(dp_shard=2, tp=2, ep=4), {"sequence_parallel": True}),
}
REMATS = {"none": Remat(), "full": Remat("full"), "selective": Remat("selective"), "every second": Remat("full", 2)}
ADAPTERS = {
    "": None,
    "adapters": Lora(4, 8.0, frozen="bf16"),
    "some, magnitudes": Lora(4, 8.0, ("q", "down"), dora=True),
}


def plan_of(sharding: str, precision: str, remat: str, adapters: str) -> Plan:
    strategy, layout, more = (SHARDINGS | SPREAD)[sharding]
    plan = Plan(layout, Batch(2, 2, 32, 64), Shard(strategy, bucket_bytes=100_000), PRECISIONS[precision], **more)  # type: ignore[arg-type]
    return replace(plan, remat=REMATS[remat], lora=ADAPTERS[adapters])


CASES = pairwise(SHARDINGS, PRECISIONS, REMATS, ADAPTERS)


@pytest.mark.matrix(40)
@pytest.mark.parametrize(("sharding", "precision", "remat", "adapters"), CASES)
def test_every_setting(sharding: str, precision: str, remat: str, adapters: str) -> None:
    plan = plan_of(sharding, precision, remat, adapters)
    assert not techniques.check(SPEC, plan, parse_cluster(f"{plan.layout.world}xCPU"))
    for rank in {0, plan.layout.world - 1}:
        assert not drift(SPEC, plan, rank).differences(), f"rank {rank} of {plan}"


@pytest.mark.matrix(40)
@pytest.mark.parametrize(
    ("sharding", "precision", "remat", "adapters"), pairwise(SPREAD, PRECISIONS, REMATS, ("", "adapters"))
)
def test_experts(sharding: str, precision: str, remat: str, adapters: str) -> None:
    plan = plan_of(sharding, precision, remat, adapters)
    assert not techniques.check(MIXTURE, plan, parse_cluster(f"{plan.layout.world}xCPU"))
    for rank in {0, plan.layout.world - 1}:
        assert not drift(MIXTURE, plan, rank).differences(), f"rank {rank} of {plan}"


def test_ranks_that_have_parts_of_rows_send_an_exponent_of_each() -> None:
    """Of both operands: forward of o and down, and with their gradients q, k, v, gate and up."""
    plan = plan_of("tp", "rows", "none", "")
    plain = replace(plan, precision=replace(plan.precision, products="compute", scales="block"))
    found, alone = (drift(SPEC, each, 0).measured.sent for each in (plan, plain))
    rows, (forward, back) = 2 * 32, (2 * [256], 5 * [256])
    exponents = Counter(("tp", "all_reduce", 4 * (rows + width)) for width in 2 * 4 * (forward + back))
    assert found - alone == exponents, found


@pytest.mark.parametrize("remat", ["none", "selective"])
def test_nothing_more_is_held_and_products_are_products(remat: str) -> None:
    """Beside the same plan in bf16: as many products, floating-point operations and bytes that are saved; two of three
    products of a layer are in float8."""
    plan = plan_of("zero3 over 4", "ends in bf16", remat, "")
    plain = replace(plan, precision=Precision("bf16"))
    sheets = [techniques.cost(sheet_of(SPEC, each), each) for each in (plan, plain)]
    units = [sheet.blocks[sheet.order[1]] for sheet in sheets]
    narrow, wide = (sorted(op.flops for op in (*unit.forward, *unit.backward) if op.kind == "matmul") for unit in units)
    assert narrow == wide
    narrow_bytes, wide_bytes = (sum(unit.tensors[one].bytes(2, 32) for one in unit.saved) for unit in units)
    assert narrow_bytes == wide_bytes
    for block, count in enumerate((0, 7, 7, 0)):
        unit = sheets[0].blocks[sheets[0].order[block]]
        names = [op.name for op in (*unit.forward, *unit.backward)]
        assert [names.count(name) for name in SCALED] == [count, count]
    assert folded(sheets[0], plan).flops == folded(sheets[1], plain).flops
