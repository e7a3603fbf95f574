"""What a file is, by its first bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.spec.file_kind import recognise
from tests.said import refuses


@pytest.mark.parametrize("length", [0x80, 0x280, 0x3C, 0x8B1F])
def test_a_header_whose_length_looks_like_another_format(tmp_path: Path, length: int) -> None:
    """A cut file is told as cut, not as a pickle, a page or an archive."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b'{"a":{"dtype":"F32"')
    assert recognise(path) is None


def test_a_pickle_under_the_name_of_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x80\x02}q\x00.")
    problem = recognise(path)
    assert problem is not None
    assert refuses(problem, "CKPT006", "model.safetensors", "a pickle", "6 bytes")
