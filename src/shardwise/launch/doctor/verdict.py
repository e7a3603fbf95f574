"""The verdict on what was measured beside what the hardware should give: a table, words, and a cluster to plan for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

from shardwise.launch.doctor.rank_work import Found
from shardwise.spec.cluster import CPU_LINK_BYTES_PER_S, Cluster
from shardwise.spec.measured import AttentionTime, Measured, Product, Sent
from shardwise.spec.units import columns, show_bytes, show_payload, show_seconds

ENOUGH = 0.7
"""The share of what the hardware should give, below which something is wrong."""
ON_CORE = 0.85
"""The share of the time of its products for which a rank must be on a core; on an idle machine it is nearly 1."""
UNEVEN = 1.3
"""How many times as long as the others a rank may take."""
BUSY = "another program on it, or a limit of power or temperature: `nvidia-smi -q -d PERFORMANCE,POWER,PIDS`"
LINK = "`nvidia-smi topo -m` shows which links there are, NCCL_DEBUG=INFO which are used"
NETWORK = "NCCL_DEBUG=INFO shows which network cards are used; or these nodes have slower ones than were assumed"
SLOT = "few PCIe lanes, or devices that share them: `nvidia-smi --query-gpu=pcie.link.width.current --format=csv`"
CROWDED = "other programs use these cores; measure again when they are idle"


@dataclass(frozen=True)
class Compared:
    """One line: how fast, in ``unit`` a second, or how long, in ``s``. ``expected`` is 0 where nobody knows; ``check``
    says what to look at where it is not reached."""

    what: str
    found: float
    unit: str
    expected: float = 0.0
    check: str = ""

    @property
    def share(self) -> float | None:
        return self.found / self.expected if self.expected else None

    def words(self, value: float) -> str:
        """A value of this line for people."""
        if self.unit == "s":
            return show_seconds(value)
        if self.unit == "flops":
            return f"{value / 1e12:,.1f} TFLOP/s" if value >= 1e12 else f"{value / 1e9:,.1f} GFLOP/s"
        return f"{show_payload(value)}/s"


def product_rate(product: Product) -> float:
    """Floating-point operations a second."""
    return 2 * product.m * product.n * product.k / product.seconds


def attention_rate(found: AttentionTime) -> float:
    """Floating-point operations a second, forward: 4 for each pair that is not masked, head and element."""
    pairs = found.tokens * (found.tokens + 1) / 2
    return 4 * pairs * found.heads * found.head_dim / found.forward_s


def ring_rate(sent: Sent) -> float:
    """Bytes a second that a rank's link carries, were the ranks in a ring: what one kind of collective can be compared
    with another by, and with a link."""
    return sent.bytes * (2 if sent.kind == "all_reduce" else 1) * (sent.ranks - 1) / sent.ranks / sent.seconds


def compare(cluster: Cluster, measured: Measured) -> Iterator[Compared]:
    """Yield what was measured, line by line, against the table's figures of the device."""
    device = cluster.device
    for dtype in dict.fromkeys(product.dtype for product in measured.products):
        best = max((product for product in measured.products if product.dtype == dtype), key=product_rate)
        expected = 0.0 if dtype not in ("bf16", "fp16") else device.bf16_flops * (device.matmul_share or 0.75)
        shape = f"{best.m:,} x {best.k:,} by {best.k:,} x {best.n:,}"
        yield Compared(f"products in {dtype}, best: {shape}", product_rate(best), "flops", expected, BUSY)
        least = min((product for product in measured.products if product.dtype == dtype), key=lambda p: p.m * p.n * p.k)
        yield Compared(f"products in {dtype}, {least.m} x {least.k} by {least.k} x {least.n}", least.seconds, "s")
    for found in measured.attention:
        name = f"attention in {found.dtype}, {found.tokens:,} tokens"
        yield Compared(name, attention_rate(found), "flops")
    yield Compared("an operation of next to no work", measured.launch_s, "s")
    for pointwise in (measured.pointwise[0], measured.pointwise[-1]):
        last = pointwise is measured.pointwise[-1]
        name = f"read and written, {show_bytes(pointwise.bytes)}"
        yield Compared(name, pointwise.bytes / pointwise.seconds, "bytes", device.hbm_bytes_per_s * last, BUSY)
    copied = {"to the device": measured.to_device_bytes_per_s, "from the device": measured.from_device_bytes_per_s}
    for name, rate in copied.items() if cluster.kind == "cuda" else ():
        yield Compared(f"copied {name}", rate, "bytes", device.host_link_bytes_per_s, SLOT)
    if measured.host_bytes_per_s:
        yield Compared("weights updated in the host's memory, by each rank", measured.host_bytes_per_s, "bytes")
    yield from _links(cluster, measured)
    disk = {"written to": measured.disk_bytes_per_s, "read from": measured.disk_read_bytes_per_s}
    for name, rate in disk.items():
        if rate:
            yield Compared(f"{name} the disk, by each rank", rate, "bytes")


def _links(cluster: Cluster, measured: Measured) -> Iterator[Compared]:
    """Yield two lines for each kind and group: the smallest message's time, and the largest one's rate on a ring."""
    device = cluster.device
    inside = {"all_reduce": device.allreduce_bytes_per_s, "all_gather": device.ring_bytes_per_s}
    inside["reduce_scatter"] = device.ring_bytes_per_s
    if cluster.kind == "cpu":
        inside = {"all_reduce": CPU_LINK_BYTES_PER_S}
    for kind, across in dict.fromkeys((sent.kind, sent.across) for sent in measured.sent):
        alike = [sent for sent in measured.sent if (sent.kind, sent.across) == (kind, across)]
        least, most = (choose(alike, key=lambda sent: sent.bytes) for choose in (min, max))
        where = "over the network" if across else "in a node"
        name = f"{kind.replace('_', '-')} {where}, {most.ranks} ranks, "
        yield Compared(f"{name}{show_bytes(least.bytes)}", least.seconds, "s")
        expected = min(inside.get(kind, 0.0), cluster.network_bytes_per_s if across else math.inf)
        check = NETWORK if across else LINK if cluster.kind == "cuda" else CROWDED
        yield Compared(f"{name}{show_bytes(most.bytes)}, on a ring", ring_rate(most), "bytes", expected, check)


def table(lines: list[Compared]) -> list[str]:
    """The lines in columns."""
    rows = [("", "measured", "should be", "")]
    for line in lines:
        expected = line.words(line.expected) if line.expected else "-"
        rows.append((line.what, line.words(line.found), expected, f"{line.share:.0%}" if line.share else ""))
    return columns(rows, "<>>>")


def shortfalls(lines: list[Compared], found: Found) -> Iterator[str]:
    """Yield in words what is below what the hardware should give, and which ranks were slow or kept off their cores."""
    for line in lines:
        if line.share is not None and line.share < ENOUGH:
            expected = f"{line.share:.0%} of the {line.words(line.expected)} that it should be"
            yield f"{line.what}: {line.words(line.found)} is {expected}; {line.check}"
    if not found.measured.disk_bytes_per_s:
        yield "no file can be written where runs would be: `--out` another directory"
    usual = median(found.products_s)
    for rank, taken_s in enumerate(found.products_s):
        if taken_s > UNEVEN * usual:
            yield f"rank {rank} takes {taken_s / usual:.1f} times as long for its products as the others, and all wait"
    for rank, share in enumerate(found.on_core):
        if share < ON_CORE:
            yield f"rank {rank} was on a core for {share:.0%} of the time of its products: {CROWDED}"


def as_measured(cluster: Cluster, measured: Measured, said: str) -> Cluster:
    """The machines with what was found on them. ``said`` takes the place of what was assumed."""
    kind = "all_reduce" if cluster.kind == "cpu" else "all_gather"
    largest = {sent.across: ring_rate(sent) for sent in measured.sent if sent.kind == kind}  # they come by size
    return replace(
        cluster,
        link_bytes_per_s=largest.get(False, cluster.link_bytes_per_s),
        network_bytes_per_s=largest.get(True, cluster.network_bytes_per_s),
        assumptions=(said,),
        measured=measured,
    )
