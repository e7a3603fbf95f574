"""The cores, free memory and GPUs of this machine, read from the kernel, without torch."""

from __future__ import annotations

import ctypes
import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardwise.spec.cgroup import memory_limits

_CPUINFO = Path("/proc/cpuinfo")


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


Gpu = tuple[str, int, tuple[int, int] | None]


def gpus() -> list[Gpu]:
    """(name, memory in bytes, CUDA's capability) of every GPU that the driver shows and this torch can use. Asks the
    driver's library: importing torch would cost a second."""
    try:
        if version("torch").endswith("+cpu"):
            return []
    except PackageNotFoundError:
        return []
    found = _driver_gpus("libcuda.so.1", "cu", "cuDeviceGetCount")
    return found or _driver_gpus("libamdhip64.so", "hip", "hipGetDeviceCount")


def _driver_gpus(library: str, prefix: str, count_function: str) -> list[Gpu]:
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return []
    count = ctypes.c_int()
    device = ctypes.c_int()
    memory = ctypes.c_size_t()
    name, parts = ctypes.create_string_buffer(256), (ctypes.c_int(), ctypes.c_int())
    if driver[prefix + "Init"](0) or driver[count_function](ctypes.byref(count)):
        return []
    total = "cuDeviceTotalMem_v2" if prefix == "cu" else "hipDeviceTotalMem"
    found: list[Gpu] = []
    for index in range(count.value):
        driver[prefix + "DeviceGet"](ctypes.byref(device), index)
        driver[prefix + "DeviceGetName"](name, len(name), device)
        driver[total](ctypes.byref(memory), device)
        capability = None
        if prefix == "cu":
            for attribute, part in enumerate(parts, 75):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
                driver["cuDeviceGetAttribute"](ctypes.byref(part), attribute, device)
            capability = parts[0].value, parts[1].value
        found.append((name.value.decode(errors="replace"), memory.value, capability))
    return found


def total_memory_bytes() -> int:
    """Memory of this machine, or what the control groups of this process may use of it; the same whenever it is
    asked."""
    return min([int(_memory().total), *(limit for limit, _ in memory_limits())])


def available_memory_bytes() -> int:
    """Memory that new allocations can have: what the kernel calls available, or what the control groups leave of it."""
    left = [limit - used for limit, used in memory_limits() if used < limit]
    return min([int(_memory().available), *left])


def _memory() -> Any:
    import psutil

    return psutil.virtual_memory()


def cpu_has_bf16() -> bool:
    """Say whether this CPU has instructions for products in bf16, as it reports itself (x86: avx512_bf16, amx_bf16;
    Arm: bf16). Some are slower with them than in fp32."""
    return _CPUINFO.exists() and bool(re.search(r"\b(avx512_|amx_)?bf16\b", _CPUINFO.read_text()))
