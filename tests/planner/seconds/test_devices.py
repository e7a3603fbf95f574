"""What was measured on GPUs that others have too stands in for the table, for this system's own steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from shardwise.models.lookup import load_spec
from shardwise.planner.comparison import seconds
from shardwise.planner.seconds.device_rates import measured_on
from shardwise.planner.seconds.rates import own_traits, rates_of
from shardwise.planner.seconds.step_seconds import timed
from shardwise.spec.cluster import Cluster, parse_cluster
from shardwise.spec.devices import devices
from shardwise.spec.measured import Measured, Product
from shardwise.spec.plan import Batch, Lora, Plan, Precision, Remat

BF16 = Precision("bf16")
ALL_OF_1B = "meta-llama/Llama-3.2-1B", Plan(batch=Batch(4, 1, 4096, 2048), precision=BF16, compile=True)
ADAPTERS = Plan(batch=Batch(2, 1, 4096, 2048), precision=BF16, compile=True, lora=Lora(16, 32.0, frozen="bf16"))
OF_8B = "meta-llama/Llama-3.1-8B", ADAPTERS
OF_8B_RECOMPUTED = OF_8B[0], replace(ADAPTERS, batch=Batch(4, 1, 4096, 2048), remat=Remat("full"))
MEASURED_MS = [
    ("1xH100", *ALL_OF_1B, 276),
    ("1xH100", *OF_8B_RECOMPUTED, 1427),
    ("1xH100", *OF_8B, 547),
    ("1xH200", *ALL_OF_1B, 264.7),
    ("1xH200", *OF_8B_RECOMPUTED, 1379.9),
    ("1xH200", *OF_8B, 528.6),
]
"""Medians of 8 steps by ``bench/gpu.py`` on one GPU, torch 2.11.0: docs/log.md, 2026-11-28."""


@pytest.mark.parametrize(("machine", "model", "plan", "took_ms"), MEASURED_MS)
def test_our_steps_take_what_is_planned_without_a_file_of_one_s_own(
    machine: str, model: str, plan: Plan, took_ms: float
) -> None:
    """Within 8 %, which by the table alone none of them is."""
    spec, cluster = load_spec(model), parse_cluster(machine)
    assert 1e3 * seconds(timed(spec, plan, cluster)).step_s == pytest.approx(took_ms, rel=0.08)
    by_table = seconds(timed(spec, plan, cluster, replace(own_traits(), measured=False)))
    assert 1e3 * by_table.step_s > 1.09 * took_ms


def test_what_is_measured_on_the_machine_itself_goes_first_and_other_programs_keep_the_table() -> None:
    cluster, plan = parse_cluster("8xH100"), Plan(precision=BF16)
    shape = (1, 8192, 8192, 8192)
    flops = 2.0 * 8192**3
    shipped = rates_of(plan, cluster, own_traits())
    assert shipped.measured == measured_on("H100-SXM-80GB")
    table = rates_of(plan, cluster, replace(own_traits(), measured=False))
    assert table.measured is None and table.product_s(*shape) != shipped.product_s(*shape)
    own = Measured(products=(Product("bf16", 8192, 8192, 8192, 1.0),))
    assert rates_of(plan, replace(cluster, measured=own), own_traits()).product_s(*shape) == pytest.approx(1.0)
    assert 0.6 * 989e12 < flops / shipped.product_s(*shape) < 989e12, "a share of the peak"


@pytest.mark.parametrize("name", ["H100-SXM-80GB", "H200-SXM"])
def test_what_ships_is_of_a_device_of_the_table_and_below_its_peaks(name: str) -> None:
    found, device = measured_on(name), devices()[name]
    assert found is not None and not found.sent and not found.disk_bytes_per_s, "of what a device computes alone"
    assert {one.dtype for one in found.products} == {"fp32", "bf16"} and found.attention
    for one in found.products:
        assert 2.0 * one.m * one.n * one.k / one.seconds < (device.bf16_flops or 0)
    largest = found.pointwise[-1]
    assert 0.7 * device.hbm_bytes_per_s < largest.bytes / largest.seconds < device.hbm_bytes_per_s


def test_of_a_device_that_nobody_measured_the_table_is_all_that_is_known() -> None:
    cluster: Cluster = parse_cluster("8xA100")
    assert measured_on(cluster.device.name) is None
    assert rates_of(Plan(precision=BF16), cluster, own_traits()).measured is None


def test_products_of_many_groups_are_one_kernel() -> None:
    """Of 128 experts with 512 rows each: no faster than one product of as many rows, and not as slow as 128 of 512
    rows, each of which would have a launch and a last wave of tiles of its own."""
    rates = rates_of(Plan(precision=BF16), parse_cluster("8xH100"), own_traits())
    many, one, alone = (
        rates.product_s(128, 512, 768, 2048),
        rates.product_s(1, 128 * 512, 768, 2048),
        128 * (rates.product_s(1, 512, 768, 2048)),
    )
    assert one <= many < 2 * one < alone


@pytest.mark.parametrize("name", ["1xH100", "1xH200"])
def test_more_rows_take_no_longer_each(name: str) -> None:
    """As many of an 8B's layers and of its adapters, forward and in the gradients of weights; on that bounds rest."""
    rates = rates_of(Plan(precision=BF16), parse_cluster(name), own_traits())
    for n, k in ((4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096), (16, 4096), (4096, 16)):
        for count in (1, 8):
            rows = [
                (rates.product_s(count, 2**power, n, k) / 2**power, rates.product_s(1, n, k, 2**power) / 2**power)
                for power in range(8, 18)
            ]
            assert all(later[i] <= before[i] * (1 + 1e-9) for before, later in pairwise(rows) for i in (0, 1))
