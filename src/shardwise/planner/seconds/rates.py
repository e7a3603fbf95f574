"""The rates of a device: from the table of hardware and the constants, or from what ``shardwise doctor`` measured.

A product takes as long as its multiplications at the best rate of the device, less what its shape costs (a last wave
of tiles that does not fill the device, a short k, sizes that 64 does not divide), or as long as its bytes, whichever is
more. Attention has a rate of its own, by the pairs of query and key that are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, exp, log
from typing import Any, Literal

from shardwise.planner.seconds.constants import shipped
from shardwise.planner.seconds.device_rates import measured_on
from shardwise.spec.cluster import Cluster
from shardwise.spec.hash_once import hash_once
from shardwise.spec.measured import FLOAT8, AttentionTime, Measured, Pointwise, Product, Sent
from shardwise.spec.plan import BYTES, Plan, Scales
from shardwise.techniques.events import Copy

Blocks = Literal["eager", "fused", "compiled"]
"""Whether each operation of a block is a kernel of its own, or what stands between two products is one: as somebody
wrote it, or as a compiler did."""
TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.78), (64, 64, 0.55))
"""Rows and columns of the output that one multiprocessor computes at a time, and the share of the best rate that
products of such tiles reach: what cuBLAS chooses from, roughly."""
ALIGNED = 64
FINE_GRAINED = 4096
"""Matrices of experts that are narrower are multiplied at a lower rate."""
DEQUANTISED_BYTES = 20.0
"""An element, besides codes and result, in plain torch: indices of 2 bytes written and read, what is looked up (4)
written, read and written as it is scaled, and read once more."""
TIMES_AS_FAST: Mapping[Scales, float] = {"row": 1.9, "block": 1.45, "mx": 1.9}
"""How many times as fast as in bf16 a product in float8 is. With scales of rows, 1.75 to 2.1 were measured on an H200
(docs/techniques/precision.md); with those of blocks nothing was: published kernels reach 870 where others reach
1,126; and with MX's neither: Blackwell's peak is twice bf16's, as Hopper's is, and what rows reach of that is taken."""
HOST_LINK_BYTES_PER_S = 31e9
"""Of a device whose bus is unknown: PCIe 4.0 x16."""
DISK_BYTES_PER_S, READ_TIMES = 2.5e9, 2.0
"""Written, of a node: what one drive of PCIe 4.0 takes for long; and how many times as fast it is read, unless that
was measured."""
CPU_FLOPS, CPU_BYTES_PER_S, CPU_UPDATED_BYTES_PER_S, CPU_LAUNCH_S = 4e10, 8e9, 2.5e10, 8e-6
"""Of a CPU process on which nothing was measured. Updates, which make no tensors, are faster than other operations."""


@dataclass(frozen=True)
class Traits:
    """The traits that tell one program from another. ``efficiency``: of all compute. ``attention``: a kernel of the
    constants, or ``auto``. ``hidden``: the share of tp's traffic that runs beside kernels. ``network``: the share of
    the network cards' rate that sharded weights reach. ``unfused``: AdamW runs operation by operation. ``logits``:
    bytes that the loss moves of a logit, as a share of our eager one's; ``fused_loss``: where blocks are compiled, so
    is what lies between its products. ``dequantised``: bytes that dequantising moves an element besides what it is
    given and returns; 0 where it is one kernel. ``chained``: the stages of a pipeline wait while the one before them
    gathers weights or sums gradients. ``experts_s``: of host time a layer with experts; 0 for that of the constants.
    ``scattered``: tensor-parallel ranks that all have the same hidden states send the next stage a part each.
    ``measured``: what this system measured on such a device goes before the table. ``float8``: how many times as fast
    as in bf16 its products in float8 are, and the share that its casts move of the bytes of ours; ours where None."""

    efficiency: float
    step_s: float
    blocks: Blocks | None = None
    attention: str = "auto"
    hidden: float = 0.0
    network: float | None = None
    unfused: bool = False
    logits: float = 1.0
    fused_loss: bool = False
    dequantised: float = 0.0
    chained: bool = True
    experts_s: float = 0.0
    scattered: bool = False
    measured: bool = False
    float8: tuple[float, float] | None = None


def own_traits() -> Traits:
    """Return the traits of this system."""
    known = shipped()
    return Traits(known["own era"], known["own step_s"], fused_loss=True, dequantised=DEQUANTISED_BYTES, measured=True)


@hash_once
@dataclass(frozen=True)
class Rates:
    """The rates of one process. ``flops_per_s``: of the best products in the dtype that is computed in;
    ``attention_per_s``: operations of attention, by pairs computed; ``score_bytes``: what attention moves a pair and
    head, forward and backward, where it is not one kernel. ``launch_s`` is the host's, ``gap_s`` the device's.
    ``host_bytes_per_s``: what its share of the host's cores reads and writes while they update weights, and
    ``host_link_bytes_per_s`` what is copied to the host and from there; ``disk_bytes_per_s`` is its share of the disks,
    read and written. ``measured`` goes before everything."""

    cuda: bool
    dtype: str
    flops_per_s: float
    attention_per_s: float
    score_bytes: tuple[float, float]
    memory_bytes_per_s: float
    copy_bytes_per_s: float
    launch_s: float
    gap_s: float
    fill_k: float
    misaligned: float
    blocks: Blocks
    bytes_share: float
    multiprocessors: int
    measured: Measured | None = None
    logits: float = 1.0
    fused_loss: bool = False
    dequantised: float = 0.0
    grouped: float = 1.0
    experts_s: float = 0.0
    scaled: float = 1.0
    casts: float = 1.0
    host_bytes_per_s: float = CPU_UPDATED_BYTES_PER_S
    host_link_bytes_per_s: tuple[float, float] = (CPU_BYTES_PER_S, CPU_BYTES_PER_S)
    disk_bytes_per_s: tuple[float, float] = (READ_TIMES * DISK_BYTES_PER_S, DISK_BYTES_PER_S)

    @cached_property
    def best_flops_per_s(self) -> float:
        """The rate that no product exceeds."""
        known = (2.0 * one.m * one.n * one.k / one.seconds for one in self._products)
        return max(known, default=self.flops_per_s) * self.scaled

    @cached_property
    def _products(self) -> tuple[Product, ...]:
        """Return the products that were measured in this dtype."""
        known = self.measured.products if self.measured else ()
        return tuple(product for product in known if product.dtype == self.dtype)

    def product_s(self, groups: int, m: int, n: int, k: int) -> float:
        """``groups`` products of m x k by k x n."""
        flops, moved = 2.0 * groups * m * n * k, BYTES[self.dtype] * groups * (m * k + k * n + m * n)
        if known := self._products:
            if groups == 1 or not self.cuda:
                return _measured_product_s(known, groups, m, n, k)
            # One kernel computes them all, and its last wave and edges leave more of the device idle.
            filled = _filled(groups, m, n, self.multiprocessors)
            seconds = _measured_product_s(known, 1, groups * m, n, k) / filled
            return max(seconds, moved / self.memory_bytes_per_s)
        rate = self.flops_per_s
        if self.cuda:
            rate *= _filled(groups, m, n, self.multiprocessors) * k / (k + self.fill_k)
            rate *= self.misaligned if n % ALIGNED or k % ALIGNED else 1.0
        return max(flops / rate, moved / self.memory_bytes_per_s)

    def grouped_s(self, groups: int, rows: int, matrix: tuple[int, int], *, outer: bool = False) -> float:
        """Products of so many ``rows``, as many for each of the ``groups``, with their ``matrix``; or the gradients of
        these (``outer``)."""
        n, k = matrix
        each = max(1, rows // groups)
        seconds = self.product_s(groups, n, k, each) if outer else self.product_s(groups, each, n, k)
        return seconds / self.grouped if self.cuda and min(matrix) < FINE_GRAINED else seconds

    def attention_s(self, flops: float, pairs: float, shape: tuple[int, int], *, backward: bool) -> float:
        """``flops`` of attention over ``pairs`` of query and key of all heads; ``shape``: tokens of a sequence and size
        of a head."""
        known = self.measured.attention if self.measured else ()
        if near := [one for one in known if one.dtype == self.dtype]:
            return flops / _attention_rate(near, shape, backward=backward)
        return flops / self.attention_per_s + pairs * self.score_bytes[backward] / self.memory_bytes_per_s

    def pointwise_s(self, moved_bytes: float, *, transcendental: bool = False) -> float:
        """A kernel that reads and writes so many bytes; of which each element takes an exponential, a CPU computes as
        long as it was measured to."""
        if transcendental and self.measured and self.measured.transcendental and not self.cuda:
            return measured_bytes_s(self.measured.transcendental, moved_bytes)
        if self.measured and self.measured.pointwise:
            return measured_bytes_s(self.measured.pointwise, moved_bytes)
        return moved_bytes * self.bytes_share / self.memory_bytes_per_s

    def updated_s(self, moved_bytes: float, kernels: int) -> float:
        """Return the seconds of ``kernels`` that read and write so many bytes of weights, gradients and moments in
        memory."""
        measured = self.measured.memory_bytes_per_s if self.measured else 0.0
        rate = self.memory_bytes_per_s if self.cuda else measured or CPU_UPDATED_BYTES_PER_S
        return moved_bytes / rate + kernels * (self.launch_s + self.gap_s)

    def copy_s(self, copied_bytes: float) -> float:
        """Return the seconds in which so many bytes are copied: into, or out of, a buffer of many tensors."""
        if self.measured and self.measured.pointwise:
            return measured_bytes_s(self.measured.pointwise, 2 * copied_bytes) if copied_bytes else 0.0
        return 2 * copied_bytes / self.copy_bytes_per_s

    def moved_s(self, copy: Copy) -> float:
        """Return the seconds of a copy from one tier to another, or within one."""
        if "disk" in (copy.source, copy.target):
            return copy.bytes / self.disk_bytes_per_s[copy.target == "disk"]
        if copy.source != copy.target:
            return copy.bytes / self.host_link_bytes_per_s[copy.target == "device"]
        return copy.bytes / self.host_bytes_per_s if copy.source == "host" else self.copy_s(copy.bytes)

    def least_copy_s(self, copied_bytes: float) -> float:
        """Return the same in pieces of whatever size, at the best rate of any."""
        if self.measured and self.measured.pointwise:
            return 2 * copied_bytes * min(one.seconds / one.bytes for one in self.measured.pointwise)
        return self.copy_s(copied_bytes)


@lru_cache(maxsize=256)
def _filled(groups: int, m: int, n: int, multiprocessors: int) -> float:
    """The share of the best rate that is left by tiles that reach over the edge, and by the last wave of them."""
    if not multiprocessors:
        return 1.0
    best = 0.0
    for rows, columns, share in TILES:
        tiles = groups * ceil(m / rows) * ceil(n / columns)
        needed = groups * m * n / (rows * columns)
        best = max(best, share * needed / (multiprocessors * ceil(tiles / multiprocessors)))
    return best


def _beside(cluster: Cluster) -> dict[str, Any]:
    """Return the rates of a process's host, of the way there and of the disk: its share of a node's, or as it was
    measured beside the others."""
    known = shipped()
    ranks = cluster.devices_per_node
    measured = cluster.measured or Measured()
    written = measured.disk_bytes_per_s or (cluster.disk_bytes_per_s or DISK_BYTES_PER_S) / ranks
    times = 1.0 if cluster.disk_bytes_per_s and not measured.disk_bytes_per_s else READ_TIMES
    found: dict[str, Any] = {"disk_bytes_per_s": (measured.disk_read_bytes_per_s or times * written, written)}
    if cluster.kind == "cpu":  # whose device is the host
        return found | {"host_bytes_per_s": measured.memory_bytes_per_s or CPU_UPDATED_BYTES_PER_S}
    bus = known["host link"] * (cluster.device.host_link_bytes_per_s or HOST_LINK_BYTES_PER_S)
    ways = measured.from_device_bytes_per_s or bus, measured.to_device_bytes_per_s or bus
    updated = measured.host_bytes_per_s or known["host update"] / ranks
    return found | {"host_bytes_per_s": updated, "host_link_bytes_per_s": ways}


def rates_of(plan: Plan, cluster: Cluster, traits: Traits) -> Rates:
    """Return the rates of one process of the cluster for what the plan computes: the same object where they were asked
    for before, so that what rests on them is found without a look at all of them. The caller says which ``traits``."""
    return _same(_made(plan, cluster, traits))


@lru_cache(maxsize=256)
def _same(rates: Rates) -> Rates:
    return rates


def _made(plan: Plan, cluster: Cluster, traits: Traits) -> Rates:
    known = shipped()
    device = cluster.device
    dtype = plan.precision.compute
    cuda = cluster.kind == "cuda"
    blocks: Blocks = traits.blocks or ("compiled" if plan.compile else "eager")
    launch_s = known["launch_s"] if cuda else CPU_LAUNCH_S
    launch_s = cluster.measured.launch_s if cluster.measured else launch_s
    measured = cluster.measured or (measured_on(device.name) if traits.measured and cuda else None)
    fixed: dict[str, Any] = {"cuda": cuda, "dtype": dtype, "measured": measured, "launch_s": launch_s}
    fixed |= {"fill_k": known["fill k"], "misaligned": known["misaligned product"], "blocks": blocks}
    fixed |= {"grouped": known["grouped product"], "experts_s": traits.experts_s or known["experts_s"]}
    fixed |= {"dequantised": traits.dequantised, "fused_loss": traits.fused_loss and plan.compile}
    if cuda and plan.precision.products == "float8":
        own = _times_as_fast(measured, dtype, plan.precision.scales)
        fixed["scaled"], fixed["casts"] = traits.float8 or (own, 1.0)
    fixed |= {"bytes_share": known[f"bytes {blocks}"], **_beside(cluster)}
    if not cuda:
        return Rates(
            flops_per_s=CPU_FLOPS * 4 / BYTES[dtype] if dtype in ("fp32", "fp64") else CPU_FLOPS,
            attention_per_s=CPU_FLOPS / 4,
            score_bytes=(0.0, 0.0),
            memory_bytes_per_s=CPU_BYTES_PER_S,
            copy_bytes_per_s=CPU_BYTES_PER_S,
            gap_s=0.0,
            multiprocessors=0,
            **fixed,
        )
    peak = device.bf16_flops or known["best product"] * 1e14
    if dtype in ("fp32", "fp64"):
        tensor_cores = plan.precision.matmul != "highest" and device.computes_bf16 and dtype == "fp32"
        peak *= known["tf32 peak" if tensor_cores else "fp32 peak"]
    best = known.get(f"best product:{device.name}", known["best product"])
    kernel = attention_kernel(plan, cluster) if traits.attention == "auto" else traits.attention
    rate = peak * traits.efficiency * best
    memory = known["memory"] * (device.hbm_bytes_per_s or 1e12) * traits.efficiency
    scores = (known["score bytes forward"], known["score bytes backward"]) if kernel == "eager" else (0.0, 0.0)
    share_of = known["attention eager"] * best if kernel == "eager" else known[f"attention {kernel}"]
    return Rates(
        flops_per_s=rate,
        attention_per_s=peak * traits.efficiency * share_of,
        score_bytes=scores,
        memory_bytes_per_s=memory,
        copy_bytes_per_s=memory * known["flat copy"],
        gap_s=known["gap_s"],
        multiprocessors=device.multiprocessors,
        logits=traits.logits,
        **fixed,
    )


def _times_as_fast(measured: Measured | None, dtype: str, scales: Scales) -> float:
    """Return how many times as fast as in ``dtype`` products in float8 are: at the best rates that were measured."""
    best = dict[str, float]()
    for one in measured.products if measured else ():
        best[one.dtype] = max(best.get(one.dtype, 0.0), one.m * one.n * one.k / one.seconds)
    narrow, wide = best.get(f"{FLOAT8} {scales}"), best.get(dtype)
    return narrow / wide if narrow and wide else TIMES_AS_FAST[scales]


def attention_kernel(plan: Plan, cluster: Cluster) -> str:
    """Return the name of the row of ``constants.csv`` with the rate of the kernel that this device takes for the plan's
    attention."""
    major = (cluster.device.capability or (8, 0))[0]
    if major < 8 or plan.precision.compute in ("fp32", "fp64"):
        return "flash1 ampere"
    age = "ampere" if major == 8 else "hopper" if major == 9 else "other"
    family = "cudnn" if plan.attention in ("cudnn", "fa3") or age == "other" else "flash2"
    return f"{family} {age}"


def _measured_product_s(known: tuple[Product, ...], groups: int, m: int, n: int, k: int) -> float:
    """Return the seconds of a product at :func:`_measured_rate`."""
    return 2.0 * groups * m * n * k / _measured_rate(known, m, n, k)


@lru_cache(maxsize=16384)
def _measured_rate(known: tuple[Product, ...], m: int, n: int, k: int) -> float:
    """Return a rate between those of the measured shapes, the nearer the more; but none that a product of half as many
    rows, or of half as long a sum, has more of: on that lower bounds of plans rest."""
    rates: dict[tuple[float, ...], float] = {
        (log(one.m), log(one.n), log(one.k)): log(2.0 * one.m * one.n * one.k / one.seconds) for one in known
    }
    found = [exp(_between(rates, (log(m), log(n), log(k))))]
    if m % 2 == 0 and m // 2 >= min(one.m for one in known):
        found.append(_measured_rate(known, m // 2, n, k))
    if k % 2 == 0 and k // 2 >= min(one.k for one in known):
        found.append(_measured_rate(known, m, n, k // 2))
    return max(found)


def _attention_rate(known: list[AttentionTime], shape: tuple[int, int], *, backward: bool) -> float:
    rates: dict[tuple[float, ...], float] = {}
    for one in known:
        flops = (10 if backward else 4) * one.heads * one.head_dim * one.tokens**2 / 2
        seconds = one.backward_s if backward else one.forward_s
        rates[log(one.tokens), log(one.head_dim)] = log(flops / seconds)
    return exp(_between(rates, (log(shape[0]), log(shape[1]))))


def _between(values: Mapping[tuple[float, ...], float], at: tuple[float, ...]) -> float:
    """The mean of values at points, weighted by the inverse square of their distance."""
    total = weights = 0.0
    for point, value in values.items():
        square = sum((one - other) ** 2 for one, other in zip(point, at, strict=True))
        weight = 1 / (square + 0.01) ** 2
        total, weights = total + weight * value, weights + weight
    return total / weights


def measured_bytes_s(
    known: Sequence[Pointwise | Sent], size: float, scale: Callable[[Any], float] = lambda one: 1.0
) -> float:
    """Return the seconds of so many bytes, on straight lines between the measured sizes; below the smallest as long as
    that, above the largest at its rate. ``scale``: the factor for those of a measurement, but below the smallest."""
    before = known[0]
    if size <= before.bytes:
        return before.seconds
    for one in known[1:]:
        if size <= one.bytes:
            part = (size - before.bytes) / (one.bytes - before.bytes)
            return scale(one) * (before.seconds + part * (one.seconds - before.seconds))
        before = one
    return scale(before) * before.seconds * size / before.bytes
