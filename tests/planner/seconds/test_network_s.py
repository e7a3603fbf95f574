"""How long collectives take, by the links that their groups share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.planner.seconds.constants import shipped
from shardwise.planner.seconds.network import CPU_LATENCY_S, Network, network_of
from shardwise.spec.cluster import Cluster, parse_cluster
from shardwise.spec.layout import Layout
from shardwise.spec.measured import Measured, Sent

H100S = parse_cluster("2x8xH100+400Gb/node")
MB = 10**6


def seconds(
    layout: Layout, group: str, kind: str = "all_gather", size: int = 800 * MB, cluster: Cluster = H100S
) -> float:
    return network_of(layout, cluster).seconds(kind, group, size)


def test_in_a_node_a_ring_moves_all_but_a_ranks_own() -> None:
    known, layout = shipped(), Layout(dp_shard=8, ranks_per_node=8)
    rate, latency = 360e9 * known["NVLink"], known["latency node_s"]
    assert seconds(layout, "fsdp") == pytest.approx(latency + 700 * MB / rate)
    assert seconds(layout, "fsdp", "reduce_scatter") == seconds(layout, "fsdp")
    assert seconds(layout, "fsdp", "all_reduce") == pytest.approx(latency + 1400 * MB / (470e9 * known["NVLink"]))


def test_one_rank_sends_nothing() -> None:
    assert seconds(Layout(ranks_per_node=8), "fsdp") == 0.0


def test_between_nodes_all_passes_the_cards() -> None:
    """One group of 16 has all of a node's 50 GB/s; eight groups of two an eighth each."""
    known = shipped()
    network = 50e9 * known["network"]
    latency = known["latency node_s"] + known["latency network_s"]
    assert seconds(Layout(dp_shard=16, ranks_per_node=8), "fsdp") == pytest.approx(latency + 750 * MB / network)
    hybrid = Layout(dp_replicate=2, dp_shard=8, ranks_per_node=8)
    assert seconds(hybrid, "dp_replicate", "all_reduce") == pytest.approx(latency + 800 * MB / (network / 8))
    assert seconds(hybrid, "fsdp") == seconds(Layout(dp_shard=8, ranks_per_node=8), "fsdp")


@pytest.mark.parametrize(
    ("layout", "group", "nodes"),
    [
        (Layout(dp_shard=8, ranks_per_node=8), "fsdp", 1),
        (Layout(dp_shard=16, ranks_per_node=8), "fsdp", 2),
        (Layout(dp_shard=4, tp=4, ranks_per_node=8), "fsdp", 2),
        (Layout(dp_shard=4, tp=4, ranks_per_node=8), "tp", 1),
        (Layout(dp_replicate=4, dp_shard=8, ranks_per_node=8), "dp_replicate", 4),
        (Layout(dp_replicate=4, dp_shard=8, ranks_per_node=8), "loss", 4),
    ],
)
def test_on_how_many_nodes_a_group_is(layout: Layout, group: str, nodes: int) -> None:
    assert network_of(layout, H100S).nodes(group) == nodes


def test_every_hop_between_nodes_waits() -> None:
    known = shipped()
    small = [
        Network(Layout(dp_shard=8 * n, ranks_per_node=8), parse_cluster(f"{n}x8xH100"), 1.0).seconds(
            "all_gather", "fsdp", 8
        )
        for n in (2, 4, 8)
    ]
    assert small[1] - small[0] == pytest.approx(2 * known["latency network_s"], rel=1e-3)
    assert small[2] - small[1] == pytest.approx(4 * known["latency network_s"], rel=1e-3)


def test_a_message_takes_as_long_whether_one_comes_or_not() -> None:
    """Around a ring each rank receives while it sends as much: what comes takes no time of its own."""
    for nodes in (1, 4):
        network = network_of(Layout(cp=8 * nodes, ranks_per_node=8), parse_cluster(f"{nodes}x8xH100"))
        assert network.seconds("send", "cp", 700 * MB) > 0 == network.seconds("recv", "cp", 700 * MB)


def test_cards_without_peer_to_peer_send_through_the_host() -> None:
    """At the rate of the table, 20 GB/s for the L40S, which was measured in use."""
    cluster = parse_cluster("8xL40S")
    took_s = seconds(Layout(dp_shard=8, ranks_per_node=8), "fsdp", cluster=cluster)
    assert took_s == pytest.approx(shipped()["latency node_s"] + 700 * MB / (20e9 * shipped()["PCIe"]))


def test_gloo_sums_everything_everywhere() -> None:
    """Its reduce-scatter sends as much as its all-reduce."""
    cluster = parse_cluster("2xCPU")
    layout = Layout(dp_shard=2, ranks_per_node=2)
    found = {
        kind: seconds(layout, "fsdp", kind, cluster=cluster) - CPU_LATENCY_S
        for kind in ("all_gather", "reduce_scatter")
    }
    assert found["reduce_scatter"] == pytest.approx(2 * found["all_gather"])


def test_what_was_measured_goes_before_the_table() -> None:
    """On straight lines between sizes; a kind that was not measured is as the table says."""
    sent = tuple(Sent("all_gather", 8, False, size, s) for size, s in ((1000, 1e-4), (2000, 3e-4)))
    cluster = replace(parse_cluster("8xH100"), measured=Measured(8, sent=sent))
    layout = Layout(dp_shard=8, ranks_per_node=8)
    assert seconds(layout, "fsdp", size=10, cluster=cluster) == 1e-4
    assert seconds(layout, "fsdp", size=1500, cluster=cluster) == pytest.approx(2e-4)
    assert seconds(layout, "fsdp", size=4000, cluster=cluster) == pytest.approx(6e-4)
    assert seconds(layout, "fsdp", "all_reduce", cluster=cluster) == seconds(layout, "fsdp", "all_reduce")
