"""Only regular files are opened, and only as much is read as such a file can hold."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shardwise.data import tokens
from shardwise.errors import DataError, PolicyError, ShardwiseError
from shardwise.models import hf, tensorfile
from shardwise.spec.files import open_regular, read_regular


@pytest.mark.timeout(10)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "model.safetensors"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="is a pipe"):
        open_regular(pipe)
    with pytest.raises(OSError, match="is a pipe"):
        tensorfile.entries(pipe)
    with pytest.raises(OSError, match="is a device"):
        read_regular("/dev/zero")
    with pytest.raises(OSError, match="is a directory"):
        read_regular(tmp_path)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", [hf.INDEX, hf.SINGLE])
def test_weights_that_are_pipes_are_refused_by_name(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(PolicyError, match="SEC006") as raised:
        hf.find_weights(tmp_path)
    assert isinstance(raised.value, ShardwiseError) and f"'{name}' is not" in str(raised.value)


@pytest.mark.timeout(10)
def test_a_tokenizer_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"TOK004.*it is a pipe"):
        tokens.open_directory(tmp_path)


def test_a_regular_file_is_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"text")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert read_regular(tmp_path / "b") == b"text"


def test_a_file_that_is_larger_than_its_kind_can_be_is_not_read(tmp_path: Path) -> None:
    endless = tmp_path / "run.json"
    endless.touch()
    os.truncate(endless, 2**42)
    with pytest.raises(OSError, match="268,435,456 bytes") as raised:
        read_regular(endless)
    assert raised.value.errno == errno.EOVERFLOW
    os.truncate(endless, 10)
    assert read_regular(endless, most_bytes=10) == bytes(10)
    with pytest.raises(OSError, match="larger than 9 "):
        read_regular(endless, most_bytes=9)
