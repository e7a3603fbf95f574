"""Token ids of Megatron and nanoGPT: the same documents as their text, and what is damaged is named."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from shardwise.data import read, tokens
from shardwise.data.binary import index_of
from shardwise.data.prepare import prepare
from shardwise.data.store import Prepared
from shardwise.errors import DataError, MissingInputError
from shardwise.spec.recipe import Data, TokenizerSection
from tests.data.conftest import prose

Make = Callable[..., Data]


def megatron(path: Path, documents: Sequence[Sequence[int]], code: int = 4, sequences: int = 1) -> Path:
    """Each document as ``sequences`` sequences, as Megatron's builder writes them."""
    dtype = {4: "<i4", 8: "<u2"}[code]
    pieces = [piece for document in documents for piece in np.array_split(np.array(document), sequences)]
    path.write_bytes(b"".join(piece.astype(dtype).tobytes() for piece in pieces))
    lengths = np.array([len(piece) for piece in pieces], dtype="<i4")
    width = np.dtype(dtype).itemsize
    pointers = (np.cumsum([0, *lengths[:-1]]) * width).astype("<i8")
    firsts = np.arange(0, len(pieces) + 1, sequences, dtype="<i8")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(firsts))
    path.with_suffix(".idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + firsts.tobytes())
    return path


@pytest.fixture
def documents(tokenizer: tokens.Tokenizer) -> list[list[int]]:
    return tokenizer.encode([prose(3 + 11 * i, seed=i) for i in range(12)])


def stored(prepared: Prepared) -> list[list[int]]:
    store = prepared.train
    ends = store.document_ends(0, store.tokens).tolist()
    return [store.read(start, end).tolist() for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@pytest.mark.parametrize("unit_bytes", [2 * 2**20, 64])
@pytest.mark.parametrize(("code", "sequences", "closed"), [(4, 1, True), (8, 1, False), (4, 3, True)])
def test_megatron(
    settings: Make,
    tmp_path: Path,
    documents: list[list[int]],
    tokenizer: tokens.Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    unit_bytes: int,
    code: int,
    sequences: int,
    closed: bool,
) -> None:
    monkeypatch.setattr(read, "UNIT_BYTES", unit_bytes)
    eot = [tokenizer.eot_id]
    path = megatron(tmp_path / "a.bin", [ids + eot * closed for ids in documents], code, sequences)
    prepared = prepare(settings(path, validation_share=0.0))
    assert stored(prepared) == [ids + eot for ids in documents]


@pytest.mark.parametrize("unit_bytes", [2 * 2**20, 64])
def test_nanogpt(
    settings: Make,
    tmp_path: Path,
    documents: list[list[int]],
    tokenizer: tokens.Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    unit_bytes: int,
) -> None:
    monkeypatch.setattr(read, "UNIT_BYTES", unit_bytes)
    eot = tokenizer.eot_id
    stream = [eot, eot, *(id_ for ids in documents for id_ in [*ids, eot]), eot, *documents[0]]
    (tmp_path / "train.bin").write_bytes(np.array(stream, dtype="<u2").tobytes())
    prepared = prepare(settings(tmp_path / "train.bin", validation_share=0.0))
    assert stored(prepared) == [[*ids, eot] for ids in [*documents, documents[0]]]
    assert prepared.manifest.empty_documents == 3
    held = prepare(settings(tmp_path / "train.bin", validation_share=0.25))
    assert held.validation is not None
    assert 0.2 < held.validation.tokens / (held.validation.tokens + held.train.tokens) < 0.3


def test_a_directory_of_both(settings: Make, tmp_path: Path, documents: list[list[int]]) -> None:
    (tmp_path / "ids").mkdir()
    megatron(tmp_path / "ids" / "a.bin", documents[:5])
    megatron(tmp_path / "ids" / "b.bin", documents[5:])
    prepared = prepare(settings(tmp_path / "ids", validation_share=0.0))
    assert prepared.train.split.documents == 12 and prepared.train.split.text_bytes == 0


def test_what_is_damaged_is_named(settings: Make, tmp_path: Path, documents: list[list[int]]) -> None:
    path = tmp_path / "a.bin"

    def refused(message: str) -> None:
        with pytest.raises(DataError, match=message):
            prepare(settings(path, validation_share=0.0))

    path.write_bytes(bytes(10_001))
    refused(r"DATA010\]: a.bin: size 10,001 .* 2 \(uint16\)")
    path.write_bytes(np.array([1, 2, 300], dtype="<u2").tobytes())
    refused(r"DATA009\]: a.bin: id 300 .* 2 >= vocab 300")
    megatron(path, documents)
    index = path.with_suffix(".idx").read_bytes()
    path.with_suffix(".idx").write_bytes(b"XX" + index[2:])
    refused(r"DATA010\]: a.idx: .*Megatron index")
    path.with_suffix(".idx").write_bytes(index[:17] + b"\x07" + index[18:])
    refused(r"DATA010\]: a.idx: version 1 .*type 7")
    path.with_suffix(".idx").write_bytes(index[:-3])
    refused(r"DATA010\]: a.idx: size [0-9,]+ .*[0-9,]+ for 12 sequences")
    path.with_suffix(".idx").write_bytes(index)
    path.write_bytes(path.read_bytes()[:40])
    refused(r"DATA010\]: a.idx: .*outside of a.bin")


def test_ids_need_their_tokenizer(settings: Make, tmp_path: Path, documents: list[list[int]]) -> None:
    path = megatron(tmp_path / "a.bin", documents)
    with pytest.raises((DataError, MissingInputError), match=r"TOK004.*holds token ids"):
        prepare(settings(path, tokenizer=TokenizerSection()))
    with pytest.raises(DataError, match=r"DATA005\]: a.bin .*token ids.*sft and dpo"):
        prepare(settings(path, validation_share=0.0), sample_tokens=64)


def test_an_index_that_is_larger_than_any_is_not_summed(tmp_path: Path) -> None:
    with (tmp_path / "a.idx").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(DataError, match="DATA010"):
        index_of(tmp_path / "a.bin")
