"""What this machine has, asked of the kernel and of the GPU driver's library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec import host
from shardwise.spec.host import available_memory_bytes, cores, gpus, total_memory_bytes


class Driver:
    """The calls of a CUDA driver with two GPUs, with the signatures of cuda.h."""

    def __getitem__(self, name: str) -> Callable[..., int]:
        calls: dict[str, Callable[..., int]] = {
            "cuInit": lambda flags: 0,
            "cuDeviceGetCount": lambda count: self.put(count, 2),
            "cuDeviceGet": lambda device, index: self.put(device, 100 + index),
            "cuDeviceGetName": lambda name, length, device: self.put_text(name, f"GPU {device.value}", length),
            "cuDeviceTotalMem_v2": lambda memory, device: self.put(memory, 2**37 + device.value),
            "cuDeviceGetAttribute": lambda part, number, device: self.put(part, {75: 7, 76: device.value - 95}[number]),
        }
        return calls[name]

    @staticmethod
    def put(pointer: Any, value: int) -> int:
        pointer._obj.value = value
        return 0

    @staticmethod
    def put_text(buffer: Any, text: str, length: int) -> int:
        assert length == 256
        buffer.value = text.encode()
        return 0


def test_gpus_are_those_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "version", lambda name: "2.13.0")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert gpus() == [("GPU 100", 2**37 + 100, (7, 5)), ("GPU 101", 2**37 + 101, (7, 6))]


def test_a_torch_without_cuda_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr(host, "version", lambda name: "2.13.0+cpu")
    assert gpus() == []


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(host, "version", lambda name: "2.13.0")
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert gpus() == []


def test_memory_and_cores() -> None:
    assert cores() >= 1
    assert 0 < available_memory_bytes() <= total_memory_bytes()


@pytest.mark.parametrize(
    ("told", "has"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: amx_bf16 avx_vnni", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("flags\t\t: fpu avx512f avx512_fp16", False),
        (None, False),
    ],
)
def test_a_cpu_says_whether_it_has_bf16(
    told: str | None, has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_CPUINFO", tmp_path / "cpuinfo")
    if told:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{told}\n\n")
    assert host.cpu_has_bf16() == has
