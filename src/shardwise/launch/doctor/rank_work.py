"""The work of each rank of ``shardwise doctor``: to measure at the same time as the others, in the same order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.launch.doctor import compute, links
from shardwise.launch.doctor.stopwatch import Clock
from shardwise.runtime import objects
from shardwise.runtime.world import device_of, process, world
from shardwise.spec.cluster import Cluster
from shardwise.spec.host import cpu_has_bf16
from shardwise.spec.layout import Layout
from shardwise.spec.measured import Measured
from shardwise.techniques import float8

BUDGET_S = {"cpu": 0.15, "cuda": 0.05}
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Found:
    """The measurements of all ranks. By rank: how long its products took in all, and for which share of that time it
    was on a core."""

    measured: Measured
    products_s: tuple[float, ...]
    on_core: tuple[float, ...] = ()


def measure(cluster: Cluster, directory: Path) -> Found:
    """Measure as one rank of ``cluster``, and write files in ``directory``. What is told by rank only rank 0 knows."""
    each = cluster.devices_per_node
    with world(Layout(cluster.nodes, each, ranks_per_node=each), cluster.kind, TIMEOUT_S) as meshes, torch.no_grad():
        clock, dtypes = Clock(device_of(cluster.kind), BUDGET_S[cluster.kind]), dtypes_of(cluster)
        scales = float8.scales_on(cluster.device.capability) if cluster.kind == "cuda" else []
        products = *compute.products(clock, dtypes), *compute.scaled_products(clock, scales)
        by_rank = [tuple(objects.gather(value)) for value in (clock.own_s, clock.cpu_s / clock.wall_s)]
        to_device, from_device = compute.copies_bytes_per_s(clock)
        measured = Measured(
            ranks=each,
            launch_s=compute.launch_s(clock),
            products=products,
            attention=tuple(compute.attention(clock, dtypes if cluster.kind == "cpu" else dtypes[-1:])),
            pointwise=tuple(compute.pointwise(clock, compute.doubled)),
            transcendental=tuple(compute.pointwise(clock, torch.sigmoid)),
            memory_bytes_per_s=compute.memory_bytes_per_s(clock),
            sent=tuple(links.collectives(clock, meshes)),
            to_device_bytes_per_s=to_device,
            from_device_bytes_per_s=from_device,
            disk_bytes_per_s=compute.disk_bytes_per_s(clock, directory, process().rank),
            host_bytes_per_s=compute.host_bytes_per_s(clock),
            disk_read_bytes_per_s=compute.disk_read_bytes_per_s(clock, directory),
        )
        return Found(measured, *by_rank)


def dtypes_of(cluster: Cluster) -> list[str]:
    """fp32, then what training computes in: bf16 where the device has instructions for it, fp16 on older GPUs."""
    if cluster.kind == "cuda":
        return ["fp32", "bf16" if cluster.device.computes_bf16 else "fp16"]
    return ["fp32", "bf16"] if cpu_has_bf16() else ["fp32"]
