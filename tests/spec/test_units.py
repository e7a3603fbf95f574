"""Sizes for people."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.spec.units import read_size, show_bytes, show_count, show_payload, show_seconds, typed


@pytest.mark.parametrize(
    ("text", "unit", "size"),
    [
        ("8k", "tokens", 8192),
        ("8K", "steps", 8000),
        ("1M", "tokens", 2**20),
        ("1.5k", "steps", 1500),
        ("0.3k", "tokens", None),
    ],
)
def test_sizes(text: str, unit: str, size: int | None) -> None:
    assert read_size(text, unit) == size


@pytest.mark.parametrize("text", ["8", "k", "8kk", "-8k", "8 k", "8Ki", "", "1e3k"])
def test_what_is_no_size(text: str) -> None:
    assert read_size(text, "tokens") is None


def test_paths_as_a_shell_takes_them() -> None:
    assert [typed(name) for name in (Path("runs/a-1"), "my runs/it's")] == ["runs/a-1", "'my runs/it'\"'\"'s'"]


def test_numbers_are_shown_short() -> None:
    assert [show_bytes(n) for n in (0, 1023, 1536, 2**30, 1.5 * 2**40)] == [
        "0 B",
        "1,023 B",
        "1.5 KiB",
        "1.0 GiB",
        "1.5 TiB",
    ]
    assert [show_payload(n) for n in (12, 22_400_000, 1.1e12)] == ["12 B", "22.4 MB", "1.1 TB"]
    assert [show_count(n) for n in (4096, 5_442_000, 70.6e9)] == ["4,096", "5.4 M", "70.6 B"]
    assert [show_seconds(s) for s in (4e-6, 0.0032, 10.5)] == ["4 us", "3.2 ms", "10.5 s"]
