"""The machine as a training run meets it: what it has, what limits it, and what of that will be in the way."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise import __version__
from shardwise.spec.cgroup import memory_limits
from shardwise.spec.cluster import Cluster
from shardwise.spec.host import available_memory_bytes, cores, gpus, total_memory_bytes
from shardwise.spec.units import columns, show_bytes

DRIVER = Path("/proc/driver/nvidia/version")
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_BYTES = 2**30
LEAST_FILES = 4096
LEAST_DISK_BYTES = 10 * 2**30


@dataclass(frozen=True)
class Machine:
    """``limited``: a control group allows less memory than there is. ``open_files``: the limit of a process.
    ``disk_free_bytes``: where runs are written."""

    host: str
    processor: str
    cores: int
    memory_bytes: int
    free_bytes: int
    limited: bool
    gpus: tuple[str, ...]
    driver: str
    versions: str
    shared_free_bytes: int
    open_files: int
    disk_free_bytes: int


def describe(directory: Path) -> Machine:
    """This machine, whose runs are written in ``directory``."""
    total = total_memory_bytes()
    return Machine(
        host=socket.gethostname(),
        processor=_first(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo")) or os.uname().machine,
        cores=cores(),
        memory_bytes=total,
        free_bytes=available_memory_bytes(),
        limited=any(limit <= total for limit, _ in memory_limits()),
        gpus=tuple(name for name, _, _ in gpus()),
        driver=_first(r"Kernel Module(?: for \S+)?\s+([\d.]+)", DRIVER),
        versions=_versions(),
        shared_free_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        disk_free_bytes=shutil.disk_usage(directory).free,
    )


def _versions() -> str:
    found = [f"shardwise {__version__}", f"torch {torch.__version__}"]
    if torch.cuda.is_available():
        found += [f"CUDA {torch.version.cuda}", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"]
    return ", ".join(found)


def _first(pattern: str, file: Path) -> str:
    """Return what the first group of ``pattern`` matches in ``file``; empty where it does not, or there is no file."""
    with suppress(OSError):
        if match := re.search(pattern, file.read_text(errors="replace")):
            return match[1].strip()
    return ""


def machine_lines(machine: Machine, cluster: Cluster) -> list[str]:
    """The machine in a few lines."""
    kinds = [f"{machine.gpus.count(name)} x {name}" for name in dict.fromkeys(machine.gpus)]
    limited = ", all that its control group allows" if machine.limited else ""
    driver = f", driver {machine.driver}" if machine.driver else ""
    rows = [
        ("machine", f"{machine.host}: {machine.cores} cores ({machine.processor})"),
        ("memory", f"{show_bytes(machine.memory_bytes)}{limited}; {show_bytes(machine.free_bytes)} free"),
        ("devices", ", ".join(kinds) + driver if kinds else "no GPU that torch can use" + driver),
        ("software", machine.versions),
        ("limits", f"{show_bytes(machine.shared_free_bytes)} of shared memory, {machine.open_files:,} open files"),
        ("disk", f"{show_bytes(machine.disk_free_bytes)} free"),
        ("ranks", f"{cluster.nodes} x {cluster.devices_per_node} on {cluster.device.name}, all at the same time"),
    ]
    return columns(rows, "<<")


def obstacles(machine: Machine, cluster: Cluster) -> Iterator[str]:
    """Yield what will be in the way of a run, with what to do about it."""
    if machine.driver and not machine.gpus:
        yield f"the NVIDIA driver {machine.driver} is there, but this torch finds no GPU: install a torch for CUDA"
    if cluster.kind == "cuda" and cluster.devices_per_node > 1 and machine.shared_free_bytes < LEAST_SHARED_BYTES:
        shared = show_bytes(machine.shared_free_bytes)
        yield f"{shared} of shared memory are little for NCCL: `docker run --shm-size=16g`, or --ipc=host"
    if 0 <= machine.open_files < LEAST_FILES:
        yield f"{machine.open_files:,} open files are few for data and checkpoints of many files: `ulimit -n 65536`"
    if machine.disk_free_bytes < LEAST_DISK_BYTES:
        yield f"{show_bytes(machine.disk_free_bytes)} of disk are little for checkpoints: `--out` on a larger one"
