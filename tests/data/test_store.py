"""Prepared data on disk: a flipped bit in any file, a wrong size and a missing file are told by name."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.data import store
from shardwise.data.pack import Windows
from shardwise.data.source import digest
from shardwise.data.store import Prepared
from shardwise.errors import DataError, MissingInputError, PolicyError, ShardwiseError
from tests.said import refuses


def all_files(prepared: Prepared) -> list[Path]:
    return sorted(path for path in prepared.directory.rglob("*") if path.is_file())


def test_every_file_is_vouched_for(prepared: Prepared) -> None:
    named = {prepared.directory / file.name for file in prepared.files()} | {prepared.directory / store.MANIFEST}
    assert named == set(all_files(prepared))


def test_one_flipped_bit_in_any_file_is_detected(prepared: Prepared) -> None:
    chance = random.Random(0)
    for path in all_files(prepared):
        whole = path.read_bytes()
        for _ in range(25):
            at, bit = chance.randrange(len(whole)), 1 << chance.randrange(8)
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            with pytest.raises(DataError, match=r"error\[DATA013\]") as caught:
                store.load(prepared.directory)
            assert caught.value.problems[0].where == str(path)
        path.write_bytes(whole)
    store.load(prepared.directory)


def test_a_changed_shard_is_named(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = prepared.directory / prepared.train.split.shards[0].name
    shard.write_bytes(shard.read_bytes()[:-2] + b"\0\0")
    with pytest.raises(DataError) as caught:
        store.load(prepared.directory)
    assert caught.value.exit_code == 65
    [problem] = caught.value.problems
    assert (problem.code, problem.where) == ("DATA013", str(shard))
    assert "train/tokens-00000.bin" in problem.what and "checksum" in problem.what
    assert "shardwise data prepare --force" in problem.fix
    store.load(prepared.directory, verify=False)
    monkeypatch.setattr(store, "ALWAYS_VERIFIED_BYTES", 1000)
    store.load(prepared.directory)
    with pytest.raises(DataError, match="DATA013"):
        store.load(prepared.directory, verify=True)


def test_b60_a_size_that_cannot_be(prepared: Prepared) -> None:
    shard = prepared.directory / prepared.train.split.shards[0].name
    whole = shard.read_bytes()
    for length, why in ((len(whole) - 1, "multiple of 2"), (len(whole) - 2, f"should be {len(whole):,}")):
        shard.write_bytes(whole[:length])
        with pytest.raises(DataError) as caught:
            store.load(prepared.directory, verify=False)
        assert refuses(caught.value, "DATA010", "train/tokens-00000.bin", f"size {length:,}", why)


def test_b59_an_id_that_the_tokenizer_does_not_have(prepared: Prepared) -> None:
    shard = prepared.directory / prepared.train.split.shards[0].name
    whole = bytearray(shard.read_bytes())
    whole[2 * 30 : 2 * 31] = (300).to_bytes(2, "little")
    shard.write_bytes(bytes(whole))
    train = store.load(prepared.directory, verify=False).train
    assert len(train.read(0, 30)) == 30
    with pytest.raises(DataError) as caught:
        train.read(20, 40)
    assert refuses(str(caught.value).splitlines()[0], "DATA009", "tokens-00000.bin", "id 300", 30, "vocab 300")


def test_missing_parts(prepared: Prepared, tmp_path: Path) -> None:
    (prepared.directory / "train" / "documents.bin").unlink()
    with pytest.raises(MissingInputError, match=r"DATA001.*train/documents.bin"):
        store.load(prepared.directory)
    (tmp_path / "void").mkdir()
    with pytest.raises(MissingInputError, match=r"DATA001.*void .*no manifest.json"):
        store.load(tmp_path / "void")


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"null", b'{"checksum": 5}', b"\xff", b'{"checksum": "", "x": 1}'])
def test_a_manifest_that_is_none(prepared: Prepared, body: bytes) -> None:
    (prepared.directory / store.MANIFEST).write_bytes(body)
    with pytest.raises(ShardwiseError, match=r"DATA013.*manifest"):
        store.load(prepared.directory)


def seal(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest, and give it the checksum of what it then says."""
    body = json.loads((directory / store.MANIFEST).read_bytes())
    del body["checksum"]
    change(body)
    (directory / store.MANIFEST).write_text(json.dumps(body | {"checksum": digest(body)}))


@pytest.mark.parametrize("name", ["../outside.bin", "{root}/outside.bin", "train/link.bin", "links/outside.bin"])
def test_a_file_outside_the_directory_is_not_read(prepared: Prepared, name: str) -> None:
    """Nor behind a link in it."""
    directory, outside = prepared.directory, prepared.directory.parent / "outside.bin"
    shutil.copyfile(directory / prepared.train.split.shards[0].name, outside)
    (directory / "train" / "link.bin").symlink_to(outside)
    (directory / "links").symlink_to(directory.parent)

    def change(body: dict[str, Any]) -> None:
        body["splits"]["train"]["shards"][0]["name"] = name.format(root=directory.parent)

    seal(directory, change)
    with pytest.raises(PolicyError, match="SEC006") as caught:
        store.load(directory)
    assert caught.value.problems[0].where == str(directory / store.MANIFEST)


ODD: list[tuple[str, Any]] = [
    ("vocab_size", 0), ("vocab_size", "300"), ("eot_id", 300), ("eot_id", -1), ("splits", {}), ("splits", []),
    ("splits.test", {}), ("splits.train.tokens", 7), ("splits.train.tokens", 2**62), ("splits.train.shard_tokens", 0),
    ("splits.train.shard_tokens", 5), ("splits.train.dtype", "O"), ("splits.train.dtype", "<u4"),
    ("splits.train.documents", 3), ("splits.train.windows", 1), ("splits.train.pairs", True), ("format", 1.5),
    ("splits.train.masks", [{"name": "train/tokens-00000.bin", "size_bytes": 1, "xxh3": ""}]), ("seq_len", 64),
    ("tokenizer_files", []), ("files", [{"path": 3}]), ("files", ["x"]), ("counts", {"x": -1}), ("prefix_tokens", 1.0),
    ("splits.train.shards.0.name", "a\0b"), ("splits.train.shards.0.name", "x" * 5000), ("format", float("nan")),
]  # fmt: skip


@pytest.mark.parametrize("place, value", ODD, ids=[f"{place}-{value!r:.20}" for place, value in ODD])
def test_a_manifest_that_cannot_be(prepared: Prepared, place: str, value: Any) -> None:
    *above, last = [int(key) if key.isdigit() else key for key in place.split(".")]

    def change(body: dict[str, Any]) -> None:
        target: Any = body
        for key in above:
            target = target[key]
        target[last] = value

    seal(prepared.directory, change)
    with pytest.raises(DataError, match="DATA013"):
        store.load(prepared.directory)


def test_boundaries_that_contradict_the_tokens(prepared: Prepared) -> None:
    """In data too large to be compared with their checksums."""
    path = prepared.directory / prepared.train.split.document_file.name
    whole = np.fromfile(path, "<u8")
    for at, end in ((0, 2**63), (2, 0), (-2, 10**9)):
        odd = whole.copy()
        odd[at] = end
        odd.tofile(path)
        train = store.load(prepared.directory, verify=False).train
        with pytest.raises(DataError, match="DATA013"):
            train.lengths()
    windows = Windows(train, 64)
    with pytest.raises(DataError, match="DATA013"):
        train.sample(train.split.documents - 1)
    odd[:-2:2] = odd[:-2:2][::-1]
    odd.tofile(path)
    with pytest.raises(DataError, match="DATA013"):
        [Windows(store.load(prepared.directory, verify=False).train, 64)[k] for k in range(len(windows))]
