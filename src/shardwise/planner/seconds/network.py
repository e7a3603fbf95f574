"""The seconds of a collective: by what it sends, the links that its group crosses, and how far apart its ranks are.

Inside a node a ring moves (n - 1) / n of what is gathered past every rank, and twice that of what is all-reduced. A
group that reaches over several nodes passes all of that through each node's network cards, which it shares with the
other groups that have ranks there. Every call waits for its slowest hop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, log2

from shardwise.planner.seconds.constants import shipped
from shardwise.planner.seconds.rates import measured_bytes_s
from shardwise.spec.cluster import Cluster
from shardwise.spec.layout import Layout
from shardwise.spec.measured import Sent

ROUNDS: dict[str, int] = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1, "all_to_all": 1}
"""How many times each kind sends what it is given around a ring."""
GLOO_ROUNDS = {**ROUNDS, "reduce_scatter": 2}
"""gloo sums everything on every rank and keeps a slice: counted on the loopback device, its reduce-scatter sends as
much as its all-reduce."""
CPU_LATENCY_S = 2e-4
UNKNOWN_LINK_BYTES_PER_S = 31e9
"""For devices that are not in the table: PCIe 4 with 16 lanes."""


@dataclass(frozen=True)
class Network:
    """The links of a cluster as the groups of a layout use them. ``network_share``: of the cards' rate, which sharded
    weights of 2021 did not reach."""

    layout: Layout
    cluster: Cluster
    network_share: float
    known: dict[tuple[str, str, float], float] = field(default_factory=dict, compare=False)

    def seconds(self, kind: str, group: str, size: float) -> float:
        """One collective of ``size`` bytes (gathered, scattered or reduced) over a group."""
        key = kind, group, size
        if key not in self.known:
            self.known[key] = self._seconds(kind, group, size)
        return self.known[key]

    def least_s(self, kind: str, group: str, size: float, calls: int) -> float:
        """Return a lower bound of the seconds of ``calls`` collectives that send ``size`` bytes together. Where seconds
        were measured they need not grow evenly with bytes, so that only one call is certain."""
        calls = 1 if self.cluster.measured else calls
        return calls * self.seconds(kind, group, size / calls) if size else 0.0

    def _seconds(self, kind: str, group: str, size: float) -> float:
        ranks = self.layout.size(group)
        if ranks == 1:
            return 0.0
        nodes = self.nodes(group)
        if kind in ("send", "recv"):
            return self._message_s(kind, group, size)
        if self.cluster.measured:
            alike = [sent for sent in self.cluster.measured.sent if sent.kind == kind and sent.across == (nodes > 1)]
            if alike:

                def on_this_ring(one: Sent) -> float:  # measured on one of another number of ranks
                    return (ranks - 1) / ranks / ((one.ranks - 1) / one.ranks)

                return measured_bytes_s(alike, size, on_this_ring)
        if self.cluster.kind == "cpu":
            passed = GLOO_ROUNDS.get(kind, 1) * size * (ranks - 1) / ranks
            return CPU_LATENCY_S + passed / self.rate(kind, nodes, group)
        passed = ROUNDS.get(kind, 1) * size * (ranks - 1) / ranks
        inside = passed / self.node_rate(kind) if ranks > nodes else 0.0
        known = shipped()
        if nodes == 1:
            return known["latency node_s"] + inside
        hops = min(nodes - 1, 2 * ceil(log2(nodes)) if kind == "all_reduce" else nodes - 1)
        latency = known["latency node_s"] + hops * known["latency network_s"]
        return latency + max(inside, passed / self.network_rate(group))

    def message_s(self, size: int) -> float:
        """``size`` bytes from a rank of a pipeline to the next: in the node, or over the cards that all ranks of a node
        send by at the same time."""
        if self.cluster.kind == "cpu":
            return CPU_LATENCY_S + size / self.node_rate("send")
        known, nodes = shipped(), self.nodes("pp")
        latency = known["latency node_s"] + (known["latency network_s"] if nodes > 1 else 0.0)
        return latency + size / (self.node_rate("send") if nodes == 1 else self.network_rate("pp"))

    def _message_s(self, kind: str, group: str, size: float) -> float:
        """Return the seconds of a message from a rank of a ring to the next: over the link of a node, or where the ring
        leaves it, for which all wait, over one card. What is received is on its way while as much is sent."""
        nodes = self.nodes(group)
        if kind == "recv":
            return 0.0
        if self.cluster.kind == "cpu":
            return CPU_LATENCY_S + size / self.rate("send", nodes, group)
        known, card = shipped(), self.cluster.device.nic_bytes_per_s * self.network_share
        if nodes == 1:
            return known["latency node_s"] + size / self.node_rate("send")
        latency = known["latency node_s"] + known["latency network_s"]
        rate = self.network_rate(group)
        return latency + size / min(rate, card or rate, self.node_rate("send"))

    def nodes(self, group: str) -> int:
        """Return on how many nodes a group has ranks."""
        per_node, reach = self.layout.ranks_per_node, self.layout.reach(group)
        if per_node % reach == 0:
            return 1
        return min(self.layout.size(group), ceil(reach / per_node))

    def links(self, group: str) -> str:
        """Name the links that bound a group's collectives: ``node``, or ``network`` for the cards between nodes."""
        return "node" if self.nodes(group) == 1 else "network"

    def rate(self, kind: str, nodes: int, group: str) -> float:
        """Bytes a second that pass a rank."""
        return self.node_rate(kind) if nodes == 1 else min(self.node_rate(kind), self.network_rate(group))

    def node_rate(self, kind: str) -> float:
        """Return the bytes a second that pass a rank inside a node."""
        cluster = self.cluster
        device = self.cluster.device
        known = shipped()
        if cluster.kind == "cpu":
            return cluster.link_bytes_per_s or UNKNOWN_LINK_BYTES_PER_S
        bus = device.allreduce_bytes_per_s if kind == "all_reduce" else device.ring_bytes_per_s
        bus = bus or cluster.link_bytes_per_s or UNKNOWN_LINK_BYTES_PER_S
        if device.peer_bytes_per_s:
            return bus * known["NVLink"]
        return min(bus, cluster.link_bytes_per_s or bus) * known["PCIe"]

    def network_rate(self, group: str) -> float:
        """Return the bytes a second that pass a rank between nodes: a group's part of the cards of a node."""
        sharing = self.layout.groups_per_node(group)
        return self.cluster.network_bytes_per_s * self.network_share / sharing


@lru_cache(maxsize=4096)
def network_of(layout: Layout, cluster: Cluster, share: float | None = None) -> Network:
    """``share``: of the network cards' rate, where a program reaches another than ours."""
    return Network(layout, cluster, shipped()["network"] if share is None else share)
