"""What the ranks of tests/launch/test_doctor.py do."""

from __future__ import annotations

import time
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from shardwise.distributed.meshes import meshes
from shardwise.launch.doctor import compute, links
from shardwise.launch.doctor.stopwatch import Clock, Work
from shardwise.spec.layout import Layout
from shardwise.spec.measured import Product, Sent
from shardwise.techniques.float8.codes import CodedMatrix

CPU = torch.device("cpu")


def sleeping(rank: int, world: int) -> tuple[list[float], Clock]:
    """What each rank is told of something that takes rank 1 twice as long, and of something short."""
    clock = Clock(CPU, 0.05)
    told = [clock.seconds(lambda: time.sleep(0.01 * (1 + rank))), clock.seconds(lambda: time.sleep(1e-5))]
    return told, clock


def counted(rank: int, world: int) -> list[int]:
    """How often each rank does something, which must be alike where it is a collective."""
    clock, calls = Clock(CPU, 0.05), [0, 0]
    one = torch.ones(1)

    def call(which: int) -> None:
        calls[which] += 1
        dist.all_reduce(one)

    clock.seconds(lambda: call(0))
    clock.seconds(lambda: (call(1), time.sleep(0.02 * rank)))
    return calls


def sent(rank: int, world: int, nodes: int) -> list[Sent]:
    """What is measured of the links of ``nodes``, which are all this machine."""
    each = world // nodes
    layout = Layout(nodes, each, ranks_per_node=each)
    with patch.object(links, "SIZES", {"cpu": (4096, 2**16)}):
        return list(links.collectives(Clock(CPU, 0.002), meshes(layout, "cpu")))


def operated(rank: int, world: int) -> tuple[list[tuple[int, int]], list[int]]:
    """How often an operation was given which sum of elements; and the rows, columns and inner dim of each product."""
    seen: list[tuple[int, int]] = []
    products: list[int] = []

    def counting(tensor: torch.Tensor) -> torch.Tensor:
        seen.append((int(tensor.sum()), tensor.numel()))
        return tensor + 1

    def product(first: torch.Tensor, second: torch.Tensor, transposed: bool) -> torch.Tensor:
        result = first @ (second.t() if transposed else second)
        products.append(result.shape[0] * 10_000 + result.shape[1] * 100 + first.shape[1])
        return result

    clock = Clock(CPU, 0.1)  # however long the machine holds up a first sample, there are many
    with (
        patch.object(compute, "POINTWISE", {"cpu": (16,)}),
        patch.object(compute, "HELD_BYTES", {"cpu": 24}),
        patch.object(compute, "PRODUCTS", {"cpu": ((3, 5, 7),)}),
        patch.object(compute, "linear", lambda x, w: product(x, w, True)),
        patch.object(compute.torch, "mm", lambda x, w: product(x, w, False)),
    ):
        list(compute.pointwise(clock, counting))
        list(compute.products(clock, ["fp32"]))
    return seen, products


def on_disk(rank: int, world: int, directory: Path) -> tuple[float, float]:
    """The rates of files that are written and read."""
    small, clock = {"cpu": 2**16}, Clock(CPU, 0.01)
    with patch.object(compute, "WRITTEN_BYTES", small), patch.object(compute, "READ_BYTES", small):
        return compute.disk_bytes_per_s(clock, directory, rank), compute.disk_read_bytes_per_s(clock, directory)


class Alone(Clock):
    """The clock of one rank, which asks no others; what is measured happens once and takes half a second."""

    def seconds(self, work: Work, share: float = 1.0) -> float:
        work()
        return 0.5

    def slowest(self, value: float) -> float:
        return value


def scaled(rank: int, world: int, able: str) -> tuple[list[Product], list[tuple[tuple[int, ...], ...]]]:
    """What is measured of products in float8, of a device that is ``able`` to multiply with one kind of scales or
    both, and the codes and scales that these get."""
    seen: list[tuple[tuple[int, ...], ...]] = []

    def multiplied(first: CodedMatrix, second: CodedMatrix, dtype: torch.dtype) -> torch.Tensor:
        seen.append(tuple(tuple(each.shape) for one in (first, second) for each in (one.codes, one.scales)))
        if able == "row" and second.rows > 1:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return first.values(dtype) @ second.values(dtype).t()

    with (
        patch.object(compute, "multiplied", multiplied),
        patch.object(compute, "SCALED_PRODUCTS", ((256, 384, 128),)),
    ):
        return list(compute.scaled_products(Clock(CPU, 0.002), ["block", "row"])), list(dict.fromkeys(seen))
