"""Products in float8: what ranks send, hold and save, to the byte, beside every setting that they meet; nothing of it
is more than without."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from shardwise import techniques
from shardwise.models.config import ModelSpec, model_spec, with_fields
from shardwise.planner.schedule import folded
from shardwise.planner.sheets import sheet_of
from shardwise.prove.drift import drift
from shardwise.prove.fake_run import measure
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch, Lora, Pipeline, Plan, Precision, Remat, Shard
from shardwise.spec.sheet import SCALED
from shardwise.techniques import float8
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
    "mx": Precision("bf16", products="float8", scales="mx", exclude=("last",)),
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
GATHERED: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "over 2": ("zero3", Layout(dp_shard=2), {}),
    "over 2 x 2": ("zero3", Layout(dp_replicate=2, dp_shard=2), {}),
    "over 4": SHARDINGS["zero3 over 4"],
    "tp, sequence": SHARDINGS["tp, sequence"],
    "stages of shards": ("zero3", Layout(dp_shard=2, pp=2), {"pipeline": Pipeline("1f1b", 1, (2, 2))}),
    "cp": SHARDINGS["cp"],
}
SPREAD_GATHERED: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "ep": SPREAD["ep"],
    "ep, shards": ("zero3", Layout(dp_shard=4, ep=2), {}),
    "ep, tp, zero3": ("zero3", Layout(dp_shard=2, tp=2, ep=2), {"sequence_parallel": True}),
}
REMATS = {"none": Remat(), "full": Remat("full"), "selective": Remat("selective"), "every second": Remat("full", 2)}
ADAPTERS = {
    "": None,
    "adapters": Lora(4, 8.0, frozen="bf16"),
    "some, magnitudes": Lora(4, 8.0, ("q", "down"), dora=True),
}


def plan_of(sharding: str, precision: str, remat: str, adapters: str) -> Plan:
    strategy, layout, more = (SHARDINGS | SPREAD | GATHERED | SPREAD_GATHERED)[sharding]
    plan = Plan(layout, Batch(2, 2, 32, 64), Shard(strategy, bucket_bytes=100_000), PRECISIONS[precision], **more)  # type: ignore[arg-type]
    return replace(plan, remat=REMATS[remat], lora=ADAPTERS[adapters])


CASES = pairwise(SHARDINGS, PRECISIONS, REMATS, ADAPTERS)


@pytest.mark.matrix(100)
@pytest.mark.rare(24)
@pytest.mark.parametrize(("sharding", "precision", "remat", "adapters"), CASES)
def test_every_setting(sharding: str, precision: str, remat: str, adapters: str) -> None:
    plan = plan_of(sharding, precision, remat, adapters)
    assert not techniques.check(SPEC, plan, parse_cluster(f"{plan.layout.world}xCPU"))
    for rank in {0, plan.layout.world - 1}:
        assert not drift(SPEC, plan, rank).differences(), f"rank {rank} of {plan}"


@pytest.mark.matrix(100)
@pytest.mark.rare(24)
@pytest.mark.parametrize(
    ("sharding", "precision", "remat", "adapters"), pairwise(SPREAD, PRECISIONS, REMATS, ("", "adapters"))
)
def test_experts(sharding: str, precision: str, remat: str, adapters: str) -> None:
    plan = plan_of(sharding, precision, remat, adapters)
    assert not techniques.check(MIXTURE, plan, parse_cluster(f"{plan.layout.world}xCPU"))
    for rank in {0, plan.layout.world - 1}:
        assert not drift(MIXTURE, plan, rank).differences(), f"rank {rank} of {plan}"


WIDTHS = ("ends in bf16", "all", "fp32")


def gathered(plan: Plan) -> Plan:
    return replace(plan, precision=replace(plan.precision, gather="float8"))


IN_CODES = [
    (model, *case)
    for model, shardings in (("dense", GATHERED), ("mixture", SPREAD_GATHERED))
    for case in pairwise(shardings, WIDTHS, ("none", "full"), ("", "adapters"))
]


def gathered_case(model: str, *case: str) -> tuple[ModelSpec, Plan]:
    return {"dense": SPEC, "mixture": MIXTURE}[model], gathered(plan_of(*case))


@pytest.mark.rare(48)
@pytest.mark.parametrize(("model", "sharding", "precision", "remat", "adapters"), IN_CODES)
def test_weights_that_are_gathered_as_codes(
    model: str, sharding: str, precision: str, remat: str, adapters: str
) -> None:
    spec, plan = gathered_case(model, sharding, precision, remat, adapters)
    assert not techniques.check(spec, plan, parse_cluster(f"{plan.layout.world}xCPU"))
    for rank in {0, plan.layout.world - 1}:
        assert not drift(spec, plan, rank).differences(), f"rank {rank} of {plan}"


@pytest.mark.prove
def test_codes_travel_in_half_the_bytes() -> None:
    """Of a block in bf16: each weight in a byte, with four for each 128 x 128, and norms as they are; nothing more of
    it is saved, and no other message changes."""
    plan = plan_of("over 2", "all", "none", "")
    narrow, wide = (measure(SPEC, each, 0) for each in (gathered(plan), plan))
    matrices, norms = sum(map(prod, float8.layers(SPEC, plan.precision).values())) // 4, 2 * 256
    calls = 4 * 2 * plan.batch.accumulation
    in_codes = Counter({("dp_shard", "all_gather", matrices + 4 * matrices // 128**2 + 2 * norms): calls})
    as_used = Counter({("dp_shard", "all_gather", 2 * (matrices + norms)): calls})
    assert (narrow.sent - wide.sent, wide.sent - narrow.sent) == (in_codes, as_used)
    assert narrow.saved_bytes == wide.saved_bytes and narrow.peak_bytes < wide.peak_bytes


@pytest.mark.prove
def test_the_peak_of_a_large_model() -> None:
    """The codes of a weight are there beside it while it is made; drift compares peaks from a GiB on."""
    spec = with_fields(SPEC, name="large-float8", hidden_size=4096, intermediate_size=14_336, head_dim=1024)
    plan = gathered(plan_of("over 4", "all", "none", "adapters"))
    found = drift(spec, replace(plan, batch=Batch(1, 1, 16, 64)), 0)
    assert found.measured.peak_bytes > 2**30 and not found.differences()


@pytest.mark.prove
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
