"""The table of known accelerators: what each has, what it is called, and on which machines it is sold."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files

from shardwise.errors import ConfigError, Problem
from shardwise.spec.host_parts import host_bytes


@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU process. Peak rates are dense; 0 where unknown. ``matmul_share`` is the share of the
    peak that plain matrix products reach. ``ring_bytes_per_s`` and ``allreduce_bytes_per_s`` are what a rank's gathers
    and all-reduces are measured to move on a ring in a full node of ``per_node``; ``nic_bytes_per_s`` is a rank's share
    of the network cards that such nodes are sold with. ``verified`` (yes, partial, no) says how far the row can be
    trusted. ``capability``: CUDA's, (9, 0) for Hopper. ``no_compiler``: for this machine, what torch.compile needs and
    does not find."""

    name: str
    memory_bytes: int
    bf16_flops: float = 0.0
    hbm_bytes_per_s: float = 0.0
    peer_bytes_per_s: float = 0.0
    host_link_bytes_per_s: float = 0.0
    matmul_share: float | None = None
    ring_bytes_per_s: float = 0.0
    allreduce_bytes_per_s: float = 0.0
    nic_bytes_per_s: float = 0.0
    per_node: int = 8
    multiprocessors: int = 0
    verified: str = "no"
    capability: tuple[int, int] | None = None
    no_compiler: str = ""

    @property
    def computes_bf16(self) -> bool:
        """Return whether it has bf16 instructions: NVIDIA's GPUs have them from Ampere on."""
        return self.capability is None or self.capability >= (8, 0)


@cache
def devices() -> dict[str, Device]:
    """The table of known accelerators by name. Memory is what CUDA reports as the total where that is known, else the
    vendor's figure read as powers of ten, which is the smaller reading."""
    found: dict[str, Device] = {}
    for row in _rows():
        memory = float(row["usable_gib"]) * 2**30 if row["usable_gib"] else float(row["memory_gb"]) * 1e9
        found[row["name"]] = Device(
            name=row["name"],
            memory_bytes=int(memory),
            bf16_flops=float(row["bf16_tflops"]) * 1e12,
            hbm_bytes_per_s=float(row["hbm_tb_s"]) * 1e12,
            peer_bytes_per_s=float(row["peer_gb_s"]) * 1e9,
            host_link_bytes_per_s=float(row["pcie_gb_s"]) * 1e9,
            matmul_share=float(row["matmul_share"]) if row["matmul_share"] else None,
            ring_bytes_per_s=float(row["ring_gb_s"]) * 1e9,
            allreduce_bytes_per_s=float(row["allreduce_gb_s"]) * 1e9,
            nic_bytes_per_s=float(row["nic_gb_s"]) * 1e9,
            per_node=int(row["per_node"]),
            multiprocessors=int(row["multiprocessors"]),
            verified=row["verified"],
            capability=(int(row["capability"][:-2]), int(row["capability"][-1])) if row["capability"] else None,
        )
    return found


@cache
def rented() -> frozenset[str]:
    """The names of those that can be had by the node: others are one company's own, or sold by the rack."""
    return frozenset(row["name"] for row in _rows() if row["rented"] == "yes")


def find_device(name: str) -> Device:
    """The device meant by ``name``, whatever its case, spaces and hyphens. Raises ConfigError (CLU002)."""
    names = names_of_devices()
    wanted = plain(name)
    for prefix in ("", "nvidia", "amdinstinct", "amd", "geforce", "nvidiageforce", "tesla"):
        bare = wanted.removeprefix(prefix)
        for whole in (bare, f"{bare}gb", f"{bare}b"):  # A100-40 and A100-40G are A100-40GB
            if whole in names:
                return devices()[names[whole]]
    begun = {row for row in devices() if begins(name, row)} if wanted else set()
    if len(begun) == 1:
        return devices()[begun.pop()]
    starts = [known for known in names if known.startswith(wanted)] if wanted else []
    variants = {names[known] for known in starts if not known[len(wanted)].isdigit()}
    near = begun or variants or {names[match] for match in starts or get_close_matches(wanted, names, 3, 0.6)}
    fix = f"did you mean {' or '.join(sorted(near))}?" if near else f"known: {', '.join(devices())}, CPU"
    raise ConfigError(Problem("CLU002", f"unknown device `{name.strip()}`", "--cluster", fix))


def begins(name: str, device: str) -> bool:
    """Return whether ``name`` is the device's without what tells sizes and forms apart: A100 is A100-PCIe-40GB's, and
    H20 no H200's."""
    words = re.findall(r"[a-z0-9]+", device.lower())
    return plain(name) in ("".join(words[:count]) for count in range(1, len(words) + 1))


def host_of(device: Device, count: int) -> tuple[int, str]:
    """Bytes of host memory that a node of so many of these is assumed to have, and whose that is."""
    return host_bytes(sold_on(device), count)


def sold_on(device: Device) -> str:
    """Tell on which kind of machine a device is sold, as the table says it."""
    return next((row["host"] for row in _rows() if row["name"] == device.name), "cloud")


@cache
def _rows() -> list[dict[str, str]]:
    with files("shardwise.spec").joinpath("hardware.csv").open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@cache
def names_of_devices() -> dict[str, str]:
    """The name in the table by every name that a device goes by, without case, spaces and hyphens."""
    names: dict[str, str] = {}
    for row in _rows():
        for name in (row["name"], *filter(None, row["aliases"].split("|"))):
            names[plain(name)] = row["name"]
    return names


def plain(name: str) -> str:
    """A name without case, spaces and hyphens."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
