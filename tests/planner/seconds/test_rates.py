"""How long products, attention and pointwise operations take, by arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.planner.seconds.constants import shipped
from shardwise.planner.seconds.rates import CPU_UPDATED_BYTES_PER_S, Rates, attention_kernel, own_traits, rates_of
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.measured import AttentionTime, Measured, Pointwise, Product
from shardwise.spec.plan import Plan, Precision

PLAIN = Rates(
    cuda=True,
    dtype="bf16",
    flops_per_s=1e14,
    attention_per_s=5e13,
    score_bytes=(0.0, 0.0),
    memory_bytes_per_s=1e12,
    copy_bytes_per_s=5e11,
    launch_s=7e-6,
    gap_s=1e-6,
    fill_k=0.0,
    misaligned=0.8,
    blocks="eager",
    bytes_share=1.0,
    multiprocessors=0,
)
"""100 TFLOP/s, 1 TB/s, and nothing that costs a product more."""
BF16 = Plan(precision=Precision("bf16"))


def test_a_large_product_takes_its_operations() -> None:
    assert PLAIN.product_s(1, 4096, 4096, 4096) == pytest.approx(2 * 4096**3 / 1e14)
    assert PLAIN.product_s(3, 4096, 4096, 4096) == pytest.approx(3 * 2 * 4096**3 / 1e14)


def test_a_thin_product_takes_its_bytes() -> None:
    """16 rows: 2 x 16 x 4096^2 operations are 5.4 us, 34 MB of weights 34 us."""
    assert PLAIN.product_s(1, 16, 4096, 4096) == pytest.approx(2 * (4096**2 + 2 * 16 * 4096) / 1e12)


def test_a_short_k_pays_the_filling_of_a_tile() -> None:
    filling = replace(PLAIN, fill_k=100.0)
    assert filling.product_s(1, 8192, 8192, 300) == pytest.approx(
        replace(PLAIN, misaligned=0.8).product_s(1, 8192, 8192, 300) * 400 / 300
    )


@pytest.mark.parametrize(("n", "k", "slower"), [(4096, 4096, 1), (4097, 4096, 0.8), (4096, 4097, 0.8)])
def test_what_64_does_not_divide_is_slower(n: int, k: int, slower: float) -> None:
    assert PLAIN.product_s(1, 4096, n, k) == pytest.approx(2 * 4096 * n * k / 1e14 / slower)


def test_the_last_wave_of_tiles_is_paid_for() -> None:
    """On 100 multiprocessors 100 tiles of 256 x 128 take one wave, 101 two: no smaller tile does better than 55 %."""
    waves = replace(PLAIN, multiprocessors=100)
    once, twice = (waves.product_s(1, 256 * rows, 128, 4096) for rows in (100, 101))
    assert once == pytest.approx(PLAIN.product_s(1, 25_600, 128, 4096))
    assert 1.05 < twice / once < 2


def test_no_product_is_faster_than_the_best() -> None:
    for m, n, k in ((64, 64, 64), (1000, 1000, 1000), (4096, 14336, 4096)):
        assert 2 * m * n * k / replace(PLAIN, multiprocessors=132).product_s(1, m, n, k) <= PLAIN.best_flops_per_s


def test_attention_has_a_rate_of_its_own_and_may_move_scores() -> None:
    assert PLAIN.attention_s(1e12, 0, (1024, 64), backward=False) == pytest.approx(1e12 / 5e13)
    eager = replace(PLAIN, score_bytes=(20.0, 30.0))
    assert eager.attention_s(1e12, 1e9, (1024, 64), backward=True) == pytest.approx(1e12 / 5e13 + 30e9 / 1e12)


def test_pointwise_and_copies() -> None:
    assert replace(PLAIN, bytes_share=0.9).pointwise_s(1e9) == pytest.approx(0.9e-3)
    assert PLAIN.copy_s(1e9) == pytest.approx(2e9 / 5e11), "read and written"


def test_what_was_measured_goes_before_the_table() -> None:
    """At a measured shape its own time; between two sizes of bytes a straight line, beyond the largest its rate."""
    product = Product("bf16", 512, 512, 512, 1e-3)
    far = Product("bf16", 64, 64, 64, 1e-4)
    attention = AttentionTime("bf16", 256, 4, 64, 2e-3, 5e-3)
    bytes_ = (Pointwise(1000, 1e-6), Pointwise(3000, 2e-6), Pointwise(10_000, 10e-6))
    measured = replace(PLAIN, measured=Measured(2, 1e-6, (far, product), (attention,), bytes_))
    assert measured.product_s(1, 512, 512, 512) == pytest.approx(1e-3, rel=0.01)
    assert measured.product_s(1, 64, 64, 64) == pytest.approx(1e-4, rel=0.01)
    assert 1e-4 < measured.product_s(1, 200, 200, 200) < 1e-3
    assert measured.best_flops_per_s == pytest.approx(2 * 512**3 / 1e-3)
    flops = 4 * 4 * 64 * 256**2 / 2
    assert measured.attention_s(flops, 0, (256, 64), backward=False) == pytest.approx(2e-3)
    assert measured.attention_s(2.5 * flops, 0, (256, 64), backward=True) == pytest.approx(5e-3)
    assert measured.pointwise_s(10) == 1e-6 and measured.pointwise_s(2000) == pytest.approx(1.5e-6)
    assert measured.pointwise_s(20_000) == pytest.approx(20e-6)


def test_a_cpu_takes_longer_for_exponentials_and_updates_at_its_memory_s_rate() -> None:
    """4,000 bytes: 2 us read and written, 8 us with an exponential. An update of 3 GB at 1.5 GB/s takes 2 s, and each
    of 10 kernels a launch. A GPU is bound by bytes either way."""
    plain, slow = (Pointwise(4000, 2e-6),), (Pointwise(4000, 8e-6),)
    found = Measured(2, 1e-6, pointwise=plain, transcendental=slow, memory_bytes_per_s=1.5e9)
    cpu = replace(PLAIN, cuda=False, gap_s=0.0, launch_s=1e-3, measured=found)
    assert cpu.pointwise_s(4000) == 2e-6
    assert cpu.pointwise_s(4000, transcendental=True) == 8e-6
    assert replace(cpu, cuda=True).pointwise_s(4000, transcendental=True) == 2e-6
    assert cpu.updated_s(3e9, 10) == pytest.approx(2.01)
    older = replace(cpu, measured=replace(found, transcendental=(), memory_bytes_per_s=0.0))  # an earlier cluster.yaml
    assert older.pointwise_s(4000, transcendental=True) == 2e-6
    assert older.updated_s(3e9, 10) == pytest.approx(3e9 / CPU_UPDATED_BYTES_PER_S + 0.01)
    assert PLAIN.updated_s(3e9, 10) == pytest.approx(3e-3 + 10 * 8e-6)


def test_a_device_has_the_rates_of_the_table() -> None:
    known, traits = shipped(), own_traits()
    rates = rates_of(BF16, parse_cluster("8xH100"), traits)
    assert rates.flops_per_s == pytest.approx(989e12 * known["best product:H100-SXM-80GB"] * known["own era"])
    assert rates.memory_bytes_per_s == pytest.approx(3.35e12 * known["memory"] * known["own era"])
    unknown = rates_of(BF16, parse_cluster("8xL40S"), traits)
    assert unknown.flops_per_s == pytest.approx(362e12 * known["best product"] * known["own era"])
    plain, tf32 = (
        rates_of(Plan(precision=Precision("fp32", matmul=how)), parse_cluster("8xA100"), traits).flops_per_s  # type: ignore[arg-type]
        for how in ("highest", "high")
    )
    assert tf32 / plain == pytest.approx(known["tf32 peak"] / known["fp32 peak"])
    assert rates_of(replace(BF16, compile=True), parse_cluster("8xH100"), traits).blocks == "compiled"
    assert not rates_of(BF16, parse_cluster("2xCPU"), traits).cuda


@pytest.mark.parametrize(
    ("device", "kernel"),
    [("A100", "flash2 ampere"), ("H100", "flash2 hopper"), ("B200", "cudnn other"), ("V100-32GB", "flash1 ampere")],
)
def test_the_kernel_of_attention(device: str, kernel: str) -> None:
    found = attention_kernel(BF16, parse_cluster(f"1x{device}"))
    assert found == kernel and f"attention {found}" in shipped()
    assert attention_kernel(replace(BF16, attention="cudnn"), parse_cluster("1xH100")) == "cudnn hopper"


def test_what_is_beside_a_device_is_shared_by_those_of_a_node_or_was_measured_so() -> None:
    """doctor's figures are of one rank while the others measure too."""
    eight, one = (rates_of(BF16, parse_cluster(text), own_traits()) for text in ("8xH100", "1xH100"))
    assert one.host_bytes_per_s == 8 * eight.host_bytes_per_s == shipped()["host update"]
    assert one.disk_bytes_per_s == (5e9, 2.5e9) == tuple(8 * rate for rate in eight.disk_bytes_per_s)
    assert one.host_link_bytes_per_s == eight.host_link_bytes_per_s == (0.8 * 63e9, 0.8 * 63e9)
    found = Measured(8, to_device_bytes_per_s=2e10, from_device_bytes_per_s=1e10, disk_bytes_per_s=1e9)
    measured = rates_of(BF16, replace(parse_cluster("8xH100"), measured=found), own_traits())
    assert measured.host_link_bytes_per_s == (1e10, 2e10) and measured.disk_bytes_per_s == (2e9, 1e9)
    assert measured.host_bytes_per_s == eight.host_bytes_per_s, "an earlier cluster.yaml"
    found = replace(found, host_bytes_per_s=7e9, disk_read_bytes_per_s=3e8)
    measured = rates_of(BF16, replace(parse_cluster("8xH100"), measured=found), own_traits())
    assert measured.host_bytes_per_s == 7e9 and measured.disk_bytes_per_s == (3e8, 1e9)
    cpu = replace(parse_cluster("2xCPU"), measured=Measured(2, memory_bytes_per_s=3e9, disk_bytes_per_s=1e8))
    assert rates_of(Plan(), cpu, own_traits()).host_bytes_per_s == 3e9
    assert rates_of(Plan(), cpu, own_traits()).disk_bytes_per_s == (2e8, 1e8)
    assert rates_of(Plan(), parse_cluster("2xCPU"), own_traits()).host_bytes_per_s == CPU_UPDATED_BYTES_PER_S
