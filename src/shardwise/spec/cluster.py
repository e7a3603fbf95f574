"""The machines: devices, their memory and speed, and the links between them; from a table, from a string, or found
here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal

from shardwise.errors import ConfigError, Problem, UsageError
from shardwise.spec.devices import Device, find_device, host_of, names_of_devices, plain, sold_on
from shardwise.spec.hash_once import hash_once
from shardwise.spec.host import available_memory_bytes, cores, gpus, total_memory_bytes
from shardwise.spec.host_parts import read_beside
from shardwise.spec.measured import Measured
from shardwise.spec.units import counted, show_bytes

Kind = Literal["cpu", "cuda"]
MOST_DEVICES, MOST_A_NODE = 2**20, 2**10
"""Of a cluster, and of a node: far beyond every machine. A plan asks how each number of them could be divided."""
DEFAULT_NETWORK_BYTES_PER_S = 100e9 / 8
CPU_LINK_BYTES_PER_S = 1.2e9
"""The rate of gloo's all-reduce between processes of one machine, measured on two cores."""
CPU_PROCESS_BYTES = 300 * 2**20
"""The memory of a process before it holds anything of the model: Python, torch and our own code, without pages that
processes share."""

_TIMES, _COUNT = r"\s*[x*×]\s*", r"\d{1,9}"
_MACHINES = re.compile(
    rf"(?:(?:(?P<nodes>{_COUNT}){_TIMES})?(?P<count>{_COUNT})(?:{_TIMES}|\s+))?(?P<name>[a-z].*|\d{{3,}}[^x*×]*)",
    re.IGNORECASE,
)
_COUNT_LAST = re.compile(rf"(?P<name>[a-z].*\d.*?|\d{{3,}}|cpus?){_TIMES}(?P<count>{_COUNT})", re.IGNORECASE)
"""``H100x8``. The name has a digit before the x, which `RTX 4090` has not."""
_RATE = re.compile(
    rf"(?:(?P<cards>{_COUNT}){_TIMES})?(?P<rate>\d+(?:\.\d+)?)\s*(?P<scale>[GgTt])(?P<unit>[bB][eE]|b(?:it)?|B|)"
    r"(?:ps|/s)?(?:\s*/\s*(?P<each>node|gpu))?"
)
_CARDS = re.compile(rf"(?:(?P<cards>{_COUNT}){_TIMES})?(?P<name>EDR|HDR|NDR|XDR)", re.IGNORECASE)
_CARD_GBIT_PER_S = {"EDR": 100.0, "HDR": 200.0, "NDR": 400.0, "XDR": 800.0}
_EXAMPLES = "8 H100, 2x8xH100+400Gb/node, 4x8xL40S+100GbE, 4x8xH100+IB or 1xRTX-4090,host=128GB,disk=2TB@3GB/s"
_SYNTAX = f"[NODESx]DEVICESxNAME[+NETWORK][,host=SIZE][,disk=SIZE@RATE], for example {_EXAMPLES}"


@hash_once
@dataclass(frozen=True)
class Cluster:
    """``nodes`` machines of ``devices_per_node``. ``link_bytes_per_s`` is what one device sends to a neighbour in its
    node, ``network_bytes_per_s`` what a whole node sends to another; both one way. ``disk_bytes`` are those of a node's
    disks for what waits there, written and read at ``disk_bytes_per_s``; 0 where nothing is known. ``measured``: what
    ``shardwise doctor`` found on one of the machines."""

    device: Device
    nodes: int = 1
    devices_per_node: int = 1
    link_bytes_per_s: float = 0.0
    network_bytes_per_s: float = 0.0
    host_memory_bytes: int = 0
    kind: Kind = "cuda"
    assumptions: tuple[str, ...] = field(default=(), compare=False)
    measured: Measured | None = None
    disk_bytes: int = 0
    disk_bytes_per_s: float = 0.0

    @property
    def world(self) -> int:
        return self.nodes * self.devices_per_node

    def __str__(self) -> str:
        """The string that :func:`parse_cluster` reads back. One node needs no network, unless it has another than is
        assumed."""
        name = self.device.name.replace(" ", "-")
        usual = network_of(self.device, self.devices_per_node) == self.network_bytes_per_s
        network = "" if self.nodes == 1 and usual else f"+{self.network_bytes_per_s * 8 / 1e9:.12g}Gb/node"
        host = self.host_memory_bytes if self.kind == "cuda" else 0
        usual = host in (0, host_of(self.device, self.devices_per_node)[0])
        beside = "" if usual else f",host={host / 2**30:.12g}GiB"
        if self.disk_bytes or self.disk_bytes_per_s:
            beside += f",disk={self.disk_bytes / 1e9:.12g}GB@{self.disk_bytes_per_s / 1e9:.12g}GB/s"
        return f"{self.nodes}x{self.devices_per_node}x{name}{network}{beside}"

    def resized(self, nodes: int, each: int, device: Device | None = None) -> Cluster:
        """Return as many ``nodes`` of ``each`` of these devices, or of others. A network, or host memory, other than
        what is assumed stays as it is; but other kinds of machines have hosts and disks of their own."""
        usual = self.network_bytes_per_s == network_of(self.device, self.devices_per_node)
        other = device or self.device
        network = network_of(other, each) if usual else self.network_bytes_per_s
        link = self.link_bytes_per_s if device is None else _link_bytes_per_s(other)
        sizes = {"nodes": nodes, "devices_per_node": each, "network_bytes_per_s": network, "link_bytes_per_s": link}
        elsewhere = sold_on(other) != sold_on(self.device)
        if elsewhere or self.host_memory_bytes == host_of(self.device, self.devices_per_node)[0]:
            sizes["host_memory_bytes"] = host_of(other, each)[0]
        if elsewhere:
            sizes |= {"disk_bytes": 0, "disk_bytes_per_s": 0.0}
        return replace(self, device=other, measured=None, **sizes)  # type: ignore[arg-type]


def parse_cluster(text: str) -> Cluster:
    """``8 H100``, ``2x8xRTX-PRO-6000+200Gb/node``, ``2048xH100+IB``, ``2xCPU``, and behind commas what is beside:
    ``host=128GB``, ``disk=2TB@3GB/s``. More devices than a node of theirs has are several nodes. Of several kinds
    (``8xH100+8xA100``), which no plan is for, the slowest alone. Raises ConfigError (CLU001, CLU002)."""
    parts = [part.strip() for part in text.split(",")]
    beside = {key: value for part in parts if "=" in part for key, value in read_beside(part).items()}
    kinds = [kind for part in parts if "=" not in part for kind in _kinds(part)]
    memory = beside.get("host_memory_bytes")
    found = [_one_kind(kind, text, None if memory is None else int(memory)) for kind in kinds or [""]]
    slowest = min(found, key=lambda each: each.device.bf16_flops)
    assumed = list(slowest.assumptions)
    if len({each.device.name for each in found}) > 1:
        named = f"{slowest.nodes}x{slowest.devices_per_node}x{slowest.device.name}"
        told = f"several kinds of GPUs in one run are not supported: this is a plan for the slower ones alone, {named}"
        assumed = [told, *assumed]
    elif len(found) > 1:
        raise _unreadable(f"`{text}` names one kind of device {len(found)} times", f"name it once: {_SYNTAX}")
    return replace(slowest, assumptions=tuple(assumed), **beside)  # type: ignore[arg-type]


def _kinds(text: str) -> list[str]:
    """``8xH100+8xA100`` as two; what is behind a plus and is no device stays there."""
    first, *more = text.split("+")
    found = [first]
    for part in more:
        match = _MACHINES.fullmatch(part.strip()) or _COUNT_LAST.fullmatch(part.strip())
        if match and match["count"] and any(map(plain(match["name"]).startswith, names_of_devices())):
            found.append(part.strip())
        else:
            found[-1] += f"+{part}"
    return found


def _one_kind(text: str, whole: str, memory: int | None) -> Cluster:
    """The machines of one kind of device, of which ``whole`` says more."""
    machines, plus, network = (part.strip() for part in text.partition("+"))
    match = _MACHINES.fullmatch(machines)
    if match is None or not match["count"]:
        match = _COUNT_LAST.fullmatch(machines) or match
    if match is None or (plus and not network):
        raise _unreadable(f"cannot read the cluster `{whole}`")
    found = match.groupdict()
    nodes, count = found.get("nodes"), int(found["count"] or 1)
    if not (int(nodes or 1) and count):
        raise _unreadable(f"`{whole}` has a count of zero")
    if plain(found["name"]) in ("cpu", "cpus"):
        _check_counts(int(nodes or 1), count, whole)
        sent = _network(text, network, Device("CPU", 0), count)
        made = _cpu_cluster(int(nodes or 1), count, sent, memory or available_memory_bytes())
        return replace(made, assumptions=made.assumptions[1:]) if memory else made
    device, assumed = find_device(found["name"]), []
    if nodes is None and count > device.per_node:
        nodes, count = _whole_nodes(device, count, f"{plus}{network}"), device.per_node
        assumed = [f"{int(nodes) * count:,} GPUs are {int(nodes):,} nodes of {count}"]
    _check_counts(int(nodes or 1), count, whole)
    cluster = _gpu_cluster(device, int(nodes or 1), count, _network(text, network, device, count), memory)
    return replace(cluster, assumptions=(*assumed, *cluster.assumptions))


def _check_counts(nodes: int, each: int, text: str) -> None:
    if too_many := beyond_all(nodes, each):
        raise _unreadable(f"`{text}` has {too_many}")


def beyond_all(nodes: int, each: int) -> str:
    """Return what is wrong with so many nodes of so many devices ``each``, beside that there are none; empty if nothing
    is."""
    if each > MOST_A_NODE:
        return f"{each:,} devices a node; the limit is {MOST_A_NODE:,}"
    return f"{nodes * each:,} devices; the limit is {MOST_DEVICES:,}" if nodes * each > MOST_DEVICES else ""


def _unreadable(what: str, fix: str = f"write {_SYNTAX}") -> ConfigError:
    return ConfigError(Problem("CLU001", what, "--cluster", fix))


def _whole_nodes(device: Device, count: int, network: str) -> str:
    """Return in words how many full nodes ``count`` devices are. Raises ConfigError (CLU001) unless each is full."""
    each = device.per_node
    if count % each == 0:
        return str(count // each)
    name = device.name.replace(" ", "-")
    nodes = next(n for n in range(-(-count // each), count + 1) if count % n == 0)
    fix = f"`1x{count}x{name}{network}`, or `{nodes}x{count // nodes}x{name}{network}`"
    raise _unreadable(f"{count} x {device.name} are no whole number of nodes, which have {each} of them each", fix)


def _network(text: str, network: str, device: Device, count: int) -> tuple[float, str] | None:
    """Read what is written behind the plus: bytes per second of a node, and what else was assumed to read it."""
    if not network:
        return None
    card, word = _CARDS.fullmatch(network), network.lower()
    if word in ("ib", "infiniband") and device.nic_bytes_per_s:
        return device.nic_bytes_per_s * count, f"{count} x {_gbit(device.nic_bytes_per_s)} of InfiniBand a node"
    if word in ("ib", "infiniband", "ethernet"):
        return DEFAULT_NETWORK_BYTES_PER_S, "one card a node"
    if card:
        rate = _CARD_GBIT_PER_S[card["name"].upper()] * 1e9 / 8
        cards = int(card["cards"] or (count if device.peer_bytes_per_s else 1))
        said = f"{cards} x {_gbit(rate)} a node"
    elif rated := _RATE.fullmatch(network):
        scale = (1e12 if rated["scale"] in "Tt" else 1e9) * (1.0 if rated["unit"] == "B" else 1 / 8)
        cards = int(rated["cards"] or 1) * (count if rated["each"] == "gpu" else 1)
        rate, said = float(rated["rate"]) * scale, ""
    else:
        raise _unreadable(f"cannot read the network of the cluster `{text}`")
    if not 1e5 <= rate * cards <= 1e18:
        raise _unreadable(f"`{text}` has a network of {'zero' if not rate * cards else 'an impossible'} bandwidth")
    return rate * cards, said


def network_of(device: Device, count: int) -> float:
    """Bytes per second of a node of ``count`` devices where no network is given: the network cards that nodes with
    NVLink are sold with, of others 100 Gb/s in all."""
    sold = device.nic_bytes_per_s * count if device.peer_bytes_per_s else 0.0
    return sold or DEFAULT_NETWORK_BYTES_PER_S


def _gbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:,.12g} Gb/s"


def _link_bytes_per_s(device: Device) -> float:
    """Return the bytes a second that one device sends to a neighbour: without NVLink, what a ring over PCIe was
    measured to move, or else what its link to the host does."""
    return device.peer_bytes_per_s or device.ring_bytes_per_s or device.host_link_bytes_per_s


def _gpu_cluster(
    device: Device, nodes: int, count: int, network: tuple[float, str] | None = None, memory: int | None = None
) -> Cluster:
    """``memory``: what a host has; without it that is assumed."""
    peer, link = device.peer_bytes_per_s, _link_bytes_per_s(device)
    rate, said = network or (network_of(device, count), "")
    assumed = []
    if nodes > 1:
        if network is None:
            sold = f"{count} x {_gbit(device.nic_bytes_per_s)} a node, " if peer and device.nic_bytes_per_s else ""
            said = f"{sold}say +<N>Gb/node"
        given = f" ({said})" if said else ""
        assumed.append(f"{_gbit(rate)} between nodes, shared by the GPUs of a node{given}")
    if count > 1:
        known = "measured" if device.ring_bytes_per_s else "at most"
        through = "NVLink or xGMI" if peer else "PCIe through the host"
        assumed.append(f"GPUs in a node communicate over {through}, {link / 1e9:g} GB/s {'per GPU' if peer else known}")
    usual, whose = host_of(device, count)
    if memory is None:
        assumed.append(f"{show_bytes(usual)} of host memory per node, {whose} (say ,host=<N>GB)")
    if device.verified != "yes":
        how = "partly" if device.verified == "partial" else "not"
        assumed.append(f"figures of the {device.name} are {how} verified")
    return Cluster(
        device=device,
        nodes=nodes,
        devices_per_node=count,
        link_bytes_per_s=link,
        network_bytes_per_s=rate,
        host_memory_bytes=usual if memory is None else memory,
        assumptions=tuple(assumed),
    )


def _cpu_cluster(nodes: int, count: int, network: tuple[float, str] | None, memory: int) -> Cluster:
    assumed = [
        f"each node has as much memory as is free on this machine, {show_bytes(memory)}, shared by {count} processes"
    ]
    rate, _ = network or (DEFAULT_NETWORK_BYTES_PER_S, "")
    if nodes > 1 and network is None:
        assumed.append(f"{_gbit(rate)} between nodes (say +<N>Gb/node)")
    return Cluster(
        device=Device("CPU", max(1, memory // count - CPU_PROCESS_BYTES), verified="yes"),
        nodes=nodes,
        devices_per_node=count,
        link_bytes_per_s=CPU_LINK_BYTES_PER_S,
        network_bytes_per_s=rate,
        host_memory_bytes=memory,
        kind="cpu",
        assumptions=tuple(assumed),
    )


def local_cluster(
    nproc: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    nodes: int = 1,
    memory_bytes: int | None = None,
) -> Cluster:
    """This machine: every GPU it sees, else two CPU processes; ``nproc`` of them when given. CPU processes share
    ``memory_bytes``, or what is free; the host of GPUs has ``memory_bytes``, or all that this process may use. Raises
    UsageError (DEV001)."""
    found, count = [] if device == "cpu" else _local_gpus(), nproc or 1
    if nodes > 1 and (too_many := beyond_all(nodes, nproc or len(found) or min(2, cores()))):
        raise _too_many(too_many, "a smaller run.nodes", "run.nodes")
    processes = f"{count} process{'es' * (count != 1)}"
    if found:
        if count > len(found):
            there = counted(len(found), "GPU")
            raise _too_many(f"{processes} asked for, and {there} found", f"`--nproc {len(found)}`")
        memory = total_memory_bytes() if memory_bytes is None else memory_bytes
        slowest = min(found, key=lambda gpu: (gpu.bf16_flops, gpu.memory_bytes))
        slowest = replace(slowest, memory_bytes=min(gpu.memory_bytes for gpu in found))
        made = _gpu_cluster(slowest, nodes, nproc or len(found), None, memory)
        kinds = list(dict.fromkeys(gpu.name for gpu in found))
        told = [f"GPUs here are of several kinds, {' and '.join(kinds)}: planned as if all were the slowest"]
        told = told * (len(kinds) > 1) + list(made.assumptions)
        host = f"each node has as much host memory as this machine, {show_bytes(memory)}"
        return replace(made, assumptions=(*told, *[host] * (nodes > 1)))
    if device == "cuda":
        here = f"`--device cpu --nproc {min(2, cores())}`"
        elsewhere = f"`shardwise plan --cluster {count}xH100` plans for machines elsewhere"
        raise _too_many(f"{processes} on GPUs asked for, and no GPU found", f"{here}; {elsewhere}")
    memory = available_memory_bytes() if memory_bytes is None else memory_bytes
    if count > (most := max(1, memory // CPU_PROCESS_BYTES)):
        taken = f"each needs {show_bytes(CPU_PROCESS_BYTES)} even before it loads the model"
        raise _too_many(f"{processes} asked for; {taken}, and {show_bytes(memory)} are free", f"`--nproc {most}`")
    return _cpu_cluster(nodes, nproc or min(2, cores()), None, memory)


def crowding(cluster: Cluster) -> str | None:
    """The warning that this machine has fewer cores than ``cluster`` has processes, if so."""
    count = cluster.devices_per_node
    if cluster.kind != "cpu" or count <= cores():
        return None
    what = f"{count} processes share {cores()} {'core' if cores() == 1 else 'cores'}, so they take turns"
    cost = f"steps are slower than with {cores()}, and each needs {show_bytes(CPU_PROCESS_BYTES)} besides the model"
    return f"warning[DEV002]: {what}: good for trying a layout; {cost}"


def _too_many(what: str, fix: str, where: str = "run.nproc") -> UsageError:
    return UsageError(Problem("DEV001", what, where, fix))


def _local_gpus() -> list[Device]:
    found = []
    for name, memory_bytes, capability in gpus():
        try:
            known = find_device(name)
        except ConfigError:
            known = Device(name, 0)
        found.append(replace(known, memory_bytes=memory_bytes, capability=capability))
    return found


def joins_products(device: str) -> bool:
    """Say whether bf16 and fp16 products can be added to an fp32 tensor directly (``out_dtype``, which torch has for
    CUDA only), without rounding to bf16 or fp16 first."""
    return device == "cuda"
