"""A step in words: what it is made of, what it waits for, and at which rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cli.step_time import assumed_rates, bottleneck, mfu, parts, step_lines, time_lines
from shardwise.models.lookup import load_spec
from shardwise.planner.comparison import tokens_per_s
from shardwise.planner.seconds.rates import own_traits, rates_of
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.measured import Measured
from shardwise.spec.plan import Batch, Estimate, Offload, Plan, Precision, Seconds, Shard, Traffic
from shardwise.spec.units import show_payload
from tests.said import shows

H100S, L40S = parse_cluster("2x8xH100+400Gb/node"), parse_cluster("8xL40S")
PLAN = Plan(Layout(dp_shard=16, ranks_per_node=8), Batch(2, 4, 1024), Shard("zero3"), Precision("bf16"))


def with_seconds(plan: Plan, axis: str, link: str, waits_s: float) -> Plan:
    made = Seconds(1 + waits_s, 0.8, 0.5, 0.1, 0.15, {axis: waits_s}, {axis: 2.0}, 0.15, 0.05, 0.9, 1.5, "a guess")
    return replace(plan, estimate=Estimate(traffic=(Traffic(axis, "all_gather", "weights", 1, 1, link),), seconds=made))


def test_a_step_is_its_parts() -> None:
    plan = with_seconds(PLAN, "dp_shard", "network", 0.25)
    found = plan.estimate.seconds
    assert found is not None and sum(part for _, part in parts(found)) == pytest.approx(found.step_s)
    assert tokens_per_s(plan) == pytest.approx(2 * 4 * 16 * 1024 / 1.25)
    told = time_lines(plan)
    assert [line.split("  ")[1] for line in told][:3] == ["products", "attention", "pointwise"]
    assert any("waits for dp_shard" in line and "2.00 s of sending" in line for line in told)


def test_the_lines_of_a_step() -> None:
    spec = load_spec("meta-llama/Llama-3.2-1B")
    first, second = step_lines(spec, with_seconds(PLAN, "dp_shard", "network", 0.25), H100S)
    assert shows(first, "a step", "1.25 s", "900.0 ms", "1.50 s", "a guess") and "tokens/s · MFU " in first
    assert second.split(" · ")[1] == "waits for dp_shard 250.0 ms"
    unknown = replace(H100S, device=replace(H100S.device, bf16_flops=0.0))
    assert mfu(spec, with_seconds(PLAN, "dp_shard", "network", 0.25), unknown) is None


def test_mfu_does_not_count_what_is_recomputed() -> None:
    spec = load_spec("meta-llama/Llama-3.2-1B")
    plan = with_seconds(PLAN, "dp_shard", "node", 0.0)
    tokens = 2 * 4 * 16 * 1024
    blocks = 16 * (2 * 2048**2 + 2 * 512 * 2048 + 3 * 2048 * 8192)
    attention = 3.5 * 4 * 16 * 32 * 64 * 1024 / 2
    flops = tokens * (6 * (blocks + 2048 * 128_256) + attention)
    for mode in ("none", "full"):
        found = mfu(spec, replace(plan, remat=replace(plan.remat, mode=mode)), H100S)  # type: ignore[arg-type]
        assert found == pytest.approx(flops / 16 / 989e12, rel=0.01)


@pytest.mark.parametrize(
    ("axis", "link", "waits_s", "cluster", "words"),
    [
        ("dp_shard", "node", 0.01, H100S, ["links", "not", "1%"]),
        ("dp_shard", "network", 1.0, H100S, ["network between nodes", "is the", "50%"]),
        ("dp_shard", "network", 0.2, H100S, ["network between nodes", "part", "17%"]),
        ("tp", "node", 0.5, H100S, ["tp;", "fewer ranks"]),
        ("tp", "node", 0.5, L40S, ["fewer ranks", "NVLink"]),
        (
            "dp_shard",
            "network",
            1.0,
            H100S,
            ["larger micro-batches", "faster"],
        ),
    ],
)
def test_whether_the_links_are_the_bottleneck(
    axis: str, link: str, waits_s: float, cluster: object, words: list[str]
) -> None:
    assert shows(bottleneck(with_seconds(PLAN, axis, link, waits_s), cluster), *words)  # type: ignore[arg-type]


def test_more_sequences_help_where_gradients_are_sent_once() -> None:
    plan = with_seconds(replace(PLAN, shard=Shard("zero1")), "dp_shard", "network", 1.0)
    assert shows(bottleneck(plan, H100S) or "", "more sequences")
    assert bottleneck(with_seconds(Plan(), "dp_shard", "node", 0.0), parse_cluster("1xH100")) is None


def test_rates_that_were_assumed_are_told_where_they_matter() -> None:
    """Of the host and the way there where the plan uses them; of the disks where files are there, unless they are
    said or measured."""
    card, said = parse_cluster("2xRTX-4090"), parse_cluster("2xRTX-4090,disk=2TB@3GB/s")
    measured = Measured(host_bytes_per_s=1e10, to_device_bytes_per_s=2e10, from_device_bytes_per_s=2e10)
    plan = Plan(layout=Layout(dp_shard=2))
    host, files = (replace(plan, offload=Offload(where)) for where in ("host", "nvme"))  # type: ignore[arg-type]
    assert assumed_rates(plan, card) is None
    told = assumed_rates(host, card) or ""
    rates = rates_of(host, card, own_traits())
    assert f"{show_payload(2 * rates.host_bytes_per_s)}/s" in told and "disk" not in told
    assert f"{show_payload(rates.host_link_bytes_per_s[0])}/s" in told
    told = assumed_rates(files, card) or ""
    assert "write 2.5 GB/s" in told and "read 5.0 GB/s" in told
    assert "disk" not in (assumed_rates(files, said) or "disk")
    assert rates_of(files, said, own_traits()).disk_bytes_per_s == (1.5e9, 1.5e9)
    assert assumed_rates(host, replace(card, measured=measured)) is None
    assert assumed_rates(host, parse_cluster("2xCPU")) is None
    assert shows(assumed_rates(files, parse_cluster("2xCPU")), "assumed", "disks", "2.5 GB/s")
