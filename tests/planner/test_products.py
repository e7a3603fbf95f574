"""How fast a CPU multiplies: measured once, remembered for this processor and this torch, and what follows from it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch

from shardwise.planner import products
from shardwise.spec.cluster import Products

MADE = Products(1.0, 0.9, 0.5, 1e-4, 2e-4)


@pytest.mark.parametrize(
    ("found", "fp32", "compute"),
    [
        (Products(1.0, 0.52, 0.5, 1e-4, 2e-4), "medium", "fp32"),  # twice as fast in fp32 too: bf16 gains 1.04
        (Products(1.0, 0.52, 0.4, 1e-4, 2e-4), "medium", "bf16"),
        (Products(1.0, 0.25, 0.25, 1e-4, 6e-1), "highest", "bf16"),  # medium would really be bf16
        (Products(1.0, 1.1, 1.6, 1e-4, 2e-4), "highest", "fp32"),  # has instructions for bf16, and is slower with them
        (Products(1.0, 0.8, 0.9, 1e-4, 2e-4), "highest", "fp32"),  # gains too little to change the numbers of a run
    ],
)
def test_what_is_measured_decides(found: Products, fp32: str, compute: str) -> None:
    assert (found.fp32, found.compute) == (fp32, compute)


def test_measuring_tells_fp32_from_bf16_and_leaves_the_settings_alone() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        found = products.measure()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert 0 < found.highest_error < 1e-3  # of sums of 512 products of standard normals
    assert found.medium_error > 0
    # 134 million operations each: on one core between 1 GFLOP/s and 10 TFLOP/s
    assert all(4e-5 < seconds < 0.4 for seconds in (found.highest_s, found.medium_s, found.bf16_s))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Products]]:
    """What was measured, which here takes no time."""
    measured: list[Products] = []

    def measure() -> Products:
        measured.append(MADE)
        return MADE

    monkeypatch.setattr(products, "measure", measure)
    yield measured


def test_it_is_measured_once_for_a_processor_and_a_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[Products]
) -> None:
    assert [products.measured(tmp_path) for _ in range(3)] == [MADE] * 3 and len(made) == 1
    (kept,) = tmp_path.iterdir()
    assert json.loads(kept.read_text())["torch"] == metadata.version("torch")
    monkeypatch.setattr(products, "processor", lambda: "flags: another")
    products.measured(tmp_path)
    monkeypatch.setattr(metadata, "version", lambda name: "9.9")
    products.measured(tmp_path)
    assert len(made) == 3 and len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"products": {"highest_s": 1}}', '{"products": 3}'])
def test_a_damaged_or_unwritable_cache_is_no_error(tmp_path: Path, made: list[Products], damaged: str) -> None:
    products.measured(tmp_path)
    next(tmp_path.iterdir()).write_text(damaged)
    assert products.measured(tmp_path) == products.measured(tmp_path) == MADE and len(made) == 2
    assert products.measured(tmp_path / next(tmp_path.iterdir()).name / "below a file") == MADE and len(made) == 3


def test_what_is_remembered_needs_no_torch(tmp_path: Path, made: list[Products]) -> None:
    products.measured(tmp_path)
    code = (
        "import sys; from pathlib import Path; from shardwise.planner.products import measured\n"
        f"assert measured(Path({str(tmp_path)!r})).compute == 'bf16' and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
