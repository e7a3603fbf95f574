"""When things happen: the host, the device and collectives beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.planner.seconds.clock import StepClock
from shardwise.planner.seconds.constants import shipped
from shardwise.planner.seconds.network import network_of
from shardwise.planner.spans import Span, fold
from shardwise.spec.cluster import parse_cluster
from shardwise.spec.layout import Layout
from shardwise.techniques.events import TO_DEVICE, TO_HOST, Compute, Copy, Send
from tests.planner.seconds.test_rates import PLAIN

LAYOUT = Layout(dp_shard=8, ranks_per_node=8)
ONE_NODE, TWO_NODES = parse_cluster("8xH100"), parse_cluster("2x8xH100+400Gb/node")
MS = 1_000_000
"""Nanoseconds."""


def clock(contention: float = 0.0, hidden: float = 0.0) -> StepClock:
    made = StepClock(PLAIN, network_of(LAYOUT, parse_cluster("8xH100")), hidden)
    made.contention = contention
    return made


def computed(device_ms: float, host_ms: float = 0.0) -> Span:
    return fold([Compute(1, round(device_ms * MS), round(host_ms * MS))])


def gather(stream: str = "gather", size: int = 10**9) -> Send:
    return Send("all_gather", "fsdp", "weights", size, stream)


def test_a_device_that_is_slower_than_the_host_sets_the_pace() -> None:
    made = clock()
    for _ in range(10):
        made.play(computed(2, 1), None)
    assert made.now.at_s["compute"] == pytest.approx(10 * 2e-3 + 7e-6) and made.now.host_s == pytest.approx(10e-3)


def test_a_host_that_is_slower_than_the_device_sets_the_pace() -> None:
    made = clock()
    for _ in range(10):
        made.play(computed(1, 2), None)
    assert made.now.at_s["compute"] == pytest.approx(20e-3, rel=0.1)


def test_each_way_over_the_bus_has_a_rate_of_its_own() -> None:
    made = clock()
    made.rates = replace(PLAIN, host_link_bytes_per_s=(1e9, 4e9))
    made.add(Copy("device", "host", 10**9, TO_HOST))
    made.add(Copy("host", "device", 10**9, TO_DEVICE))
    assert (made.now.at_s[TO_HOST], made.now.at_s[TO_DEVICE]) == (1.0, 0.25)
    made.rates = replace(PLAIN, disk_bytes_per_s=(2e9, 5e8))
    made.add(Copy("host", "disk", 10**9, "disk"))
    assert made.now.at_s["disk"] == 2.0
    made.add(Copy("disk", "host", 10**9, "disk"))
    assert made.now.at_s["disk"] == 2.5


def test_a_collective_that_is_over_in_time_is_hidden() -> None:
    made = clock()
    took_s = made.network.seconds("all_gather", "fsdp", 10**9)
    made.add(gather())
    made.record("gather", "there")
    made.play(computed(1e3 * took_s + 5), None)
    made.wait("compute", "there")
    assert not made.now.exposed_s and sum(made.now.sent_s.values()) == pytest.approx(took_s)
    assert made.now.at_s["compute"] == pytest.approx(took_s + 5e-3, rel=1e-3)


def test_what_is_left_of_a_collective_is_exposed() -> None:
    made = clock()
    took_s = made.network.seconds("all_gather", "fsdp", 10**9)
    made.add(gather())
    made.record("gather", "there")
    made.play(computed(1), None)
    made.wait("compute", "there")
    (exposed_s,) = made.now.exposed_s.values()
    assert exposed_s == pytest.approx(took_s - 1e-3, rel=1e-2) and made.now.at_s["compute"] == pytest.approx(took_s)


def test_collectives_of_a_stream_follow_one_another_and_wait_for_what_they_are_told() -> None:
    made = clock()
    took_s = made.network.seconds("all_gather", "fsdp", 10**9)
    made.play(computed(3), None)
    made.record("compute", "ready")
    made.wait("gather", "ready")
    made.add(gather())
    made.add(gather())
    assert made.now.at_s["gather"] == pytest.approx(3e-3 + 2 * took_s, rel=1e-2)


def replicas() -> StepClock:
    """Two nodes, each with a copy of the weights: slices are gathered in a node, and summed between the two."""
    made = StepClock(PLAIN, network_of(Layout(dp_replicate=2, dp_shard=8, ranks_per_node=8), TWO_NODES))
    made.contention = 0.0
    return made


@pytest.mark.parametrize("layout", [LAYOUT, Layout(dp_shard=16, ranks_per_node=8)])
def test_a_gather_and_a_reduction_over_the_same_links_follow_one_another(layout: Layout) -> None:
    """One communicator does one thing at a time, whatever the streams: both take the sum of their times, as they were
    given, in a node and between two."""
    made = StepClock(PLAIN, network_of(layout, TWO_NODES if layout.world == 16 else ONE_NODE))
    took_s = made.network.seconds("all_gather", "fsdp", 10**9)
    made.add(gather())
    made.add(Send("reduce_scatter", "fsdp", "gradients", 10**9, "reduce"))
    assert made.now.at_s["gather"] == pytest.approx(took_s)
    assert made.now.at_s["reduce"] == pytest.approx(2 * took_s)


def test_what_is_sent_between_nodes_runs_beside_what_is_sent_in_them() -> None:
    """Hybrid: 7/8 of 1e9 bytes pass a rank in the node, and a sum of 1e9 / 8 the eighth of a node's cards that it has;
    neither waits for the other."""
    made, known = replicas(), shipped()
    made.add(gather())
    made.add(Send("all_reduce", "dp_replicate", "gradients", 10**9 // 8, "all_reduce"))
    in_node_s = known["latency node_s"] + 7 / 8 * 1e9 / (360e9 * known["NVLink"])
    cards_s = known["latency node_s"] + known["latency network_s"] + 1e9 / 8 / (50e9 / 8 * known["network"])
    assert made.now.at_s["gather"] == pytest.approx(in_node_s)
    assert made.now.at_s["all_reduce"] == pytest.approx(cards_s)


def test_blocks_whose_traffic_takes_longer_than_they_compute_take_its_sum() -> None:
    """ZeRO-3, backward: a block is gathered while the one before is computed, and its gradients are scattered after it.
    Ten blocks of 1 ms, gathered and scattered in 2.3 ms each, take ten of both, and the first is computed between."""
    made = StepClock(PLAIN, network_of(LAYOUT, ONE_NODE))
    made.contention = 0.0
    took_s = made.network.seconds("all_gather", "fsdp", 10**9)
    assert took_s > 2e-3
    made.add(gather())
    made.record("gather", ("gathered", 0))
    for block in range(10):
        made.wait("compute", ("gathered", block))
        if block < 9:
            made.add(gather())
            made.record("gather", ("gathered", block + 1))
        made.play(computed(1), None)
        made.record("compute", ("ready", block))
        made.wait("reduce", ("ready", block))
        made.add(Send("reduce_scatter", "fsdp", "gradients", 10**9, "reduce"))
        made.record("reduce", "scattered")
    made.wait("compute", "scattered")
    assert made.now.at_s["compute"] == pytest.approx(20 * took_s, rel=1e-2)
    assert sum(made.now.exposed_s.values()) == pytest.approx(20 * took_s - 10e-3, rel=1e-2)


def test_data_parallel_sums_are_hidden_but_for_the_last() -> None:
    """DDP in a node: buckets are summed while backward computes what takes longer; the device waits for the last."""
    made = clock()
    took_s = made.network.seconds("all_reduce", "fsdp", 10**8)
    for bucket in range(4):
        made.play(computed(2e3 * took_s), None)
        made.record("compute", bucket)
        made.wait("reduce", bucket)
        made.add(Send("all_reduce", "fsdp", "gradients", 10**8, "reduce"))
        made.record("reduce", ("summed", bucket))
    made.wait("compute", ("summed", 3))
    assert made.now.at_s["compute"] == pytest.approx(9 * took_s, rel=2e-2)
    assert sum(made.now.exposed_s.values()) == pytest.approx(took_s, rel=2e-2)


def test_what_was_sent_while_the_device_waited_slows_nothing_afterwards() -> None:
    """A gather that the device waits for from its first moment on: what is computed after it takes what it takes."""
    made = clock(contention=0.2)
    made.add(gather(size=10**10))
    made.record("gather", "there")
    made.wait("compute", "there")
    begun_s = made.now.at_s["compute"]
    made.play(computed(1), None)
    assert made.now.at_s["compute"] - begun_s == pytest.approx(1e-3)


def test_a_hidden_collective_slows_the_kernels_beside_it() -> None:
    """By a share of its own time, and of theirs at most."""
    made = clock(contention=0.2)
    took_s = made.network.seconds("all_gather", "fsdp", 10**9)
    made.add(gather())
    made.play(computed(1e3 * took_s * 10), None)
    assert made.now.at_s["compute"] == pytest.approx(10 * took_s + 0.2 * took_s, rel=1e-2)
    short = clock(contention=0.2)
    short.add(gather())
    short.play(computed(1), None)
    assert short.now.at_s["compute"] == pytest.approx(1.2e-3, rel=1e-2)


@pytest.mark.parametrize("hidden", [0.0, 0.75])
def test_what_is_sent_between_kernels_is_waited_for(hidden: float) -> None:
    made = clock(hidden=hidden)
    took_s = made.network.seconds("all_gather", "fsdp", 10**9)
    made.play(fold([Compute(1, MS), gather("compute"), gather("compute")]), None)
    assert made.now.at_s["compute"] == pytest.approx(1e-3 + 2 * (1 - hidden) * took_s, rel=1e-2)
    assert sum(made.now.exposed_s.values()) == pytest.approx(2 * (1 - hidden) * took_s)


def test_copies_into_flat_buffers_are_computed() -> None:
    made = clock()
    made.add(Copy("device", "device", 10**9))
    assert made.now.at_s["compute"] == pytest.approx(2e9 / 5e11, rel=1e-2)
    assert made.now.busy_s["copies"] == pytest.approx(2e9 / 5e11)


def test_time_may_go_on_as_it_went_between_two_moments() -> None:
    made = clock()
    made.play(computed(1), None)
    first = made.now.copy()
    made.play(computed(2), None)
    second = made.now.copy()
    made.now.goes_on(first, second, 5)
    assert made.now.at_s["compute"] == pytest.approx(1e-3 + 6 * 2e-3, rel=1e-2)
    assert made.now.busy_s["products"] == pytest.approx(13e-3)


def test_a_clock_needs_no_more_than_rates_and_a_network() -> None:
    cpu = StepClock(replace(PLAIN, cuda=False), network_of(LAYOUT, parse_cluster("8xCPU")))
    assert cpu.contention == 0.0
