"""The seconds of a step: what they are made of, and how they change with the plan and the machines."""

from __future__ import annotations

from dataclasses import replace
from math import exp, hypot, log

import pytest

from shardwise import techniques
from shardwise.models.lookup import load_spec
from shardwise.planner.comparison import seconds
from shardwise.planner.price import price
from shardwise.planner.seconds import step_seconds
from shardwise.planner.seconds.constants import shipped
from shardwise.planner.seconds.rates import own_traits, rates_of
from shardwise.planner.seconds.step_seconds import band, optimizer, timed
from shardwise.planner.sheets import sheet_of
from shardwise.spec.cluster import Cluster, parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.measured import Measured
from shardwise.spec.plan import Batch, Lora, Optim, Plan, Precision, Remat, Seconds, Shard

ONE_B = load_spec("meta-llama/Llama-3.2-1B")
H100S = parse_cluster("8xH100")
PLAN = Plan(
    Layout(dp_shard=8, ranks_per_node=8), Batch(1, 1, 4096, 1024), Shard("zero3"), Precision("bf16"), compile=True
)
SHARDINGS = {
    "ddp": replace(PLAN, layout=Layout(dp_replicate=8, ranks_per_node=8), shard=Shard("ddp")),
    "zero1": replace(PLAN, shard=Shard("zero1")),
    "zero2": replace(PLAN, shard=Shard("zero2")),
    "zero3": PLAN,
    "hybrid": replace(PLAN, layout=Layout(dp_replicate=2, dp_shard=4, ranks_per_node=4)),
    "tp": replace(PLAN, layout=Layout(dp_shard=4, tp=2, ranks_per_node=8), sequence_parallel=True),
}


def of(plan: Plan, cluster: Cluster = H100S) -> Seconds:
    return seconds(timed(ONE_B, price(ONE_B, plan, cluster), cluster))


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_the_parts_add_up(sharding: str) -> None:
    cluster = parse_cluster("2x4xH100+400Gb/node") if sharding == "hybrid" else H100S
    found = of(SHARDINGS[sharding], cluster)
    parts = found.compute_s + sum(found.exposed_s.values()) + found.optimizer_s + found.host_s
    assert found.step_s == pytest.approx(parts) and found.low_s < found.step_s < found.high_s
    kinds = found.products_s + found.attention_s + found.pointwise_s
    assert 0.8 * found.compute_s < kinds <= found.compute_s * (1 + 1e-9)
    assert all(found.exposed_s.get(axis, 0) <= sent * (1 + 1e-9) for axis, sent in found.sent_s.items())


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 6, 9])
def test_micro_batches_that_are_left_out_are_as_those_that_are_played(
    sharding: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(SHARDINGS[sharding], batch=replace(PLAN.batch, accumulation=micro_batches))
    few = of(plan)
    monkeypatch.setattr(step_seconds, "PLAYED", 100)
    all_ = of(plan)
    assert few.step_s == pytest.approx(all_.step_s, rel=1e-6)
    assert few.exposed_s == pytest.approx(all_.exposed_s, rel=1e-6)


def test_slower_links_expose_more() -> None:
    layout = Layout(dp_shard=16, ranks_per_node=8)
    found = [of(replace(PLAN, layout=layout), parse_cluster(f"2x8xH100+{gb}Gb/node")) for gb in (3200, 400, 100, 10)]
    exposed = [sum(each.exposed_s.values()) for each in found]
    assert exposed == sorted(exposed) and exposed[0] < 0.1 * exposed[-1]
    assert len({round(each.products_s, 9) for each in found}) == 1


def test_more_is_not_faster() -> None:
    plain = of(PLAN)
    assert (
        of(replace(PLAN, remat=Remat("full"))).step_s
        > of(replace(PLAN, remat=Remat("selective"))).step_s
        > plain.step_s
    )
    assert of(replace(PLAN, compile=False)).step_s > plain.step_s
    assert of(PLAN, parse_cluster("8xA100")).step_s > plain.step_s > of(PLAN, parse_cluster("8xB200")).step_s


@pytest.mark.parametrize(
    ("name", "moments", "moved"), [("adamw", None, 32), ("adamw", "bf16", 24), ("adamw8bit", None, 20)]
)
def test_the_optimizer_moves_its_state(name: str, moments: str | None, moved: int) -> None:
    """Clipping reads gradients, AdamW reads weights, gradients and moments, and writes weights and moments."""
    plan = replace(PLAN, optim=Optim(name, moments=moments))  # type: ignore[arg-type]
    rates = rates_of(plan, H100S, own_traits())
    costed = techniques.cost(sheet_of(ONE_B, plan), plan)
    numbers = 1_235_814_400 / 8
    took_s = optimizer(costed, plan, rates) - 12 * (rates.launch_s + rates.gap_s)
    assert took_s == pytest.approx(moved * numbers / rates.memory_bytes_per_s, rel=0.01)
    assert optimizer(costed, plan, rates, unfused=True) > 1.5 * took_s


def test_adapters_leave_little_to_update() -> None:
    plan = replace(SHARDINGS["ddp"], lora=Lora(16, frozen="bf16"))
    assert of(plan).optimizer_s < 0.1 * of(SHARDINGS["ddp"]).optimizer_s


def test_the_band() -> None:
    """In logs and in quadrature; twice between sources for a device without published steps, half after doctor."""
    known = shipped()
    between, within, slow = known["band source"], known["band row"], known["band slow"]
    low_s, high_s, basis = band(PLAN, H100S, 10.0, 0.0)
    assert -log(low_s / 10) == pytest.approx(hypot(between, within)) and "this device" in basis
    assert high_s == pytest.approx(10 * exp(slow * hypot(between, within)))
    wider, _, basis = band(PLAN, parse_cluster("8xL40S"), 10.0, 0.0)
    assert -log(wider / 10) == pytest.approx(hypot(2 * between, within)) and "other devices" in basis
    narrower, _, basis = band(PLAN, replace(H100S, measured=Measured()), 10.0, 0.0)
    assert narrower > low_s > wider and "doctor" in basis
    network, _, _ = band(PLAN, parse_cluster("2x8xH100"), 10.0, 5.0)
    assert -log(network / 10) == pytest.approx(hypot(between, within, log(1.5)))
