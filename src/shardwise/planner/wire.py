"""How long a step's collectives keep the links busy, at the cluster's rates, without latency and without overlap with
computation. Enough to compare splits of the ranks, until plans predict seconds."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.spec.cluster import Cluster, Kind
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Traffic

PASSES: dict[Kind, dict[str, int]] = {
    "cuda": {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2},
    "cpu": {"all_gather": 1, "reduce_scatter": 2, "all_reduce": 2},
}
"""How many times each kind of collective sends its payload around a ring of ranks. gloo sums everything on every rank
and keeps a slice: counted on the loopback device, its reduce-scatter sends as much as its all-reduce."""

UNKNOWN_LINK_BYTES_PER_S = 31e9
"""For devices that are not in the table: PCIe 4 with 16 lanes."""


def wire_s(traffic: Iterable[Traffic], layout: Layout, cluster: Cluster) -> float:
    """Seconds of a step on the wire: of each collective the slower of a rank's own link and of the network, which the
    groups that pass through a node share."""
    link_bytes_per_s, total = cluster.link_bytes_per_s or UNKNOWN_LINK_BYTES_PER_S, 0.0
    for sent in traffic:
        ranks, groups = layout.size(sent.axis), layout.groups_per_node(sent.axis)
        ring_bytes = sent.bytes * PASSES[cluster.kind].get(sent.kind, 1) * (ranks - 1) / ranks
        seconds = ring_bytes / link_bytes_per_s if layout.ranks_per_node > 1 else 0.0
        if sent.link == "network":
            seconds = max(seconds, groups * ring_bytes / cluster.network_bytes_per_s)
        total += seconds
    return total
