"""The measurements of ``shardwise doctor`` on a machine, which the planner then uses in place of a table's figures."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.spec.hash_once import hash_once

FLOAT8 = "float8"
"""The dtype of a product in float8 begins so; behind it is the kind of its scales."""


@dataclass(frozen=True)
class Product:
    """One matrix product of ``m`` x ``k`` by ``k`` x ``n`` in ``dtype``: the mean over the forms in which a layer has
    such products (forward, and the gradients of its input and weight), of each the median of several."""

    dtype: str
    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True)
class AttentionTime:
    """Causal attention, forward and backward apart: ``tokens`` a sequence, and heads of ``head_dim``. ``flops`` of each
    are those that the planner counts: 4 a pair of query and key, head and element of a head forward, 10 backward."""

    dtype: str
    tokens: int
    heads: int
    head_dim: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Pointwise:
    """An operation that reads and writes ``bytes`` in all: what memory gives, and for few bytes a cache."""

    bytes: int
    seconds: float


@dataclass(frozen=True)
class Sent:
    """One collective of ``bytes`` (gathered, scattered or reduced) over the ``ranks`` of a group; ``across`` the
    network or within a node."""

    kind: str
    ranks: int
    across: bool
    bytes: int
    seconds: float


@hash_once
@dataclass(frozen=True)
class Measured:
    """``ranks``: how many processes of the machine measured at the same time, since they share memory, cores and disk;
    every figure is that of one of them, the slowest. ``launch_s``: what an operation of next to no work takes.
    ``transcendental``: pointwise operations that compute an exponential for each element. ``memory_bytes_per_s``: of
    CPUs, the rate at which memory that is in no cache is read and written in place; ``host_bytes_per_s``: of the host
    of GPUs, while AdamW clips and updates fp32 weights there. ``disk_bytes_per_s``: the rate at which a file reaches
    the disk; ``disk_read_bytes_per_s``: at which it is read from there, past the page cache. A rate of 0 was not
    measured."""

    ranks: int = 1
    launch_s: float = 0.0
    products: tuple[Product, ...] = ()
    attention: tuple[AttentionTime, ...] = ()
    pointwise: tuple[Pointwise, ...] = ()
    transcendental: tuple[Pointwise, ...] = ()
    memory_bytes_per_s: float = 0.0
    sent: tuple[Sent, ...] = ()
    to_device_bytes_per_s: float = 0.0
    from_device_bytes_per_s: float = 0.0
    disk_bytes_per_s: float = 0.0
    host_bytes_per_s: float = 0.0
    disk_read_bytes_per_s: float = 0.0
