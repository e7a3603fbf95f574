"""Prepared text on disk: token shards behind memory maps, document boundaries, and a manifest that vouches for both.

<directory>/manifest.json            written last; carries its own checksum
            tokenizer/               tokenizer.json, tokenizer_config.json
            train/tokens-00000.bin   token ids, little-endian uint16 or uint32; all but the last of one length
            train/documents.bin      [documents, 2] little-endian uint64: tokens, bytes of text up to its end
            validation/...

and for supervised fine-tuning, where a document is a sample:

            train/mask-00000.bin     uint8 beside each token: 1 where it is supervised
            train/packs.bin          [documents, 2] little-endian uint64: window, sample; ordered by both

For preference optimisation samples 2i and 2i + 1 are the chosen and the rejected answer of pair i, in one window.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import TypeAdapter

from shardwise.data.source import Sources, digest, reading
from shardwise.errors import DataError, MissingInputError, Problem
from shardwise.spec.files import MANIFEST_BYTES, open_regular, read_regular

FORMAT = 1
MANIFEST = "manifest.json"
_READ_BYTES = 16 * 2**20
ALWAYS_VERIFIED_BYTES = 4 * 2**30
"""Data of at most this size are verified whenever they are opened (about a second). Verifying more would delay every
start."""


@dataclass(frozen=True)
class FileSum:
    """One file of a prepared directory: its relative name, its size, and the xxh3-128 hash of its bytes."""

    name: str
    size_bytes: int
    xxh3: str


@dataclass(frozen=True)
class Split:
    """What the manifest says of ``train`` or ``validation``. ``text_bytes`` counts the UTF-8 bytes of the documents, or
    of the supervised text of samples for fine-tuning. Only such samples have ``masks``, ``packs``, ``windows`` and
    ``supervised_tokens``; with ``pairs``, every two samples are a pair of answers."""

    tokens: int
    documents: int
    text_bytes: int
    dtype: str
    shard_tokens: int
    shards: tuple[FileSum, ...]
    document_file: FileSum
    masks: tuple[FileSum, ...] = ()
    packs: FileSum | None = None
    windows: int = 0
    supervised_tokens: int = 0
    pairs: bool = False

    @property
    def records(self) -> int:
        """Documents or samples; of pairs, the two answers are one."""
        return self.documents // 2 if self.pairs else self.documents


@dataclass(frozen=True)
class DataManifest:
    """What a prepared directory holds and what it was made from. ``fingerprint`` covers the sources' names, sizes and
    contents, the settings and the tokenizer: equal fingerprints mean equal tokens in equal order. ``settings`` are
    for people to read. ``seq_len``: of samples packed into windows; ``counts``: what became of records on the way;
    ``prefix_tokens``: how many tokens that stand for no text each document begins with."""

    fingerprint: str
    tokenizer_hash: str
    vocab_size: int
    eot_id: int
    splits: dict[str, Split]
    tokenizer_files: tuple[FileSum, ...]
    files: tuple[dict[str, Any], ...]
    settings: dict[str, Any]
    empty_documents: int = 0
    format: int = FORMAT
    counts: dict[str, int] = field(default_factory=dict)
    seq_len: int | None = None
    prefix_tokens: int = 0


def checksum(path: Path) -> str:
    """xxh3-128 of a file, in hex."""
    summed = xxhash.xxh3_128()
    with reading(path), open_regular(path) as file:
        while block := file.read(_READ_BYTES):
            summed.update(block)
    return summed.hexdigest()


@reading()
def source_files(sources: Sources) -> dict[Path, dict[str, Any]]:
    """Path, size, time and checksum of each source file."""
    facts: dict[Path, dict[str, Any]] = {}
    for path in (s.original for s in (*sources.train, *sources.validation)):
        if path not in facts:
            stat = path.stat()
            told = {"path": str(path), "size_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
            facts[path] = {**told, "xxh3": checksum(path)}
    return facts


@reading()
def first_change(files: Iterable[dict[str, Any]]) -> str | None:
    """The first file whose content has changed. Missing files do not count: prepared data may travel alone."""
    for facts in files:
        path = Path(facts["path"])
        if not path.is_file():
            continue
        stat = path.stat()
        same = (stat.st_size, stat.st_mtime_ns) == (facts["size_bytes"], facts["mtime_ns"])
        if not same and (stat.st_size != facts["size_bytes"] or checksum(path) != facts["xxh3"]):
            return str(path)
    return None


def write_manifest(directory: Path, manifest: DataManifest) -> None:
    """Write ``manifest.json`` with its own checksum."""
    body = asdict(manifest)
    body["checksum"] = digest(body)
    (directory / MANIFEST).write_text(json.dumps(body, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _read_manifest(path: Path) -> DataManifest:
    def damaged(why: str) -> DataError:
        return DataError(Problem("DATA013", f"the manifest of the prepared data is damaged: {why}", str(path), _REDO))

    try:
        body = json.loads(read_regular(path, MANIFEST_BYTES))
        stored = body.pop("checksum")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise damaged("it is not the JSON that was written") from error
    if stored != digest(body):
        raise damaged("its checksum does not match")
    if body["format"] != FORMAT:
        raise damaged(f"it has format {body['format']}, this version reads {FORMAT}")
    return TypeAdapter(DataManifest).validate_python(body)


_REDO = "prepare it again: shardwise data prepare --force"


@dataclass(frozen=True)
class TokenStore:
    """The tokens of one split as one long stream of documents, each closed by end-of-text."""

    directory: Path
    split: Split
    vocab_size: int
    eot_id: int
    prefix_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.split.tokens

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [start, min(stop, tokens)), across shards. Raises DATA009 for an id that the tokenizer does not
        have."""
        length = self.split.shard_tokens
        tokens = self._read(self._shards, start, stop)
        if tokens.size and int(tokens.max()) >= self.vocab_size:
            at = start + int(np.argmax(tokens >= self.vocab_size))
            name = self.directory / self.split.shards[at // length].name
            what = f"{name.name}: id {int(tokens.max())} at token {at % length:,} >= vocab {self.vocab_size}"
            raise DataError(Problem("DATA009", what, str(name), _REDO))
        return tokens

    def read_mask(self, start: int, stop: int) -> NDArray[np.int64]:
        """1 where the token is supervised, else 0, for tokens [start, stop) of samples."""
        return self._read(self._masks, start, stop)

    def _read(self, shards: list[NDArray[Any]], start: int, stop: int) -> NDArray[np.int64]:
        length = self.split.shard_tokens
        stop = min(stop, self.split.tokens)
        parts = []
        for index in range(start // length, -(-stop // length)):
            first = index * length
            parts.append(shards[index][max(start - first, 0) : stop - first].astype(np.int64))
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def sample(self, index: int) -> tuple[int, int, int]:
        """First token, end, and bytes of supervised text of one sample."""
        rows = self._documents[max(index - 1, 0) : index + 1].astype(np.int64)
        begin, bytes_before = rows[0].tolist() if index else (0, 0)
        end, text_bytes = rows[-1].tolist()
        return begin, end, text_bytes - bytes_before

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document or sample."""
        ends = self._documents[:, 0].astype(np.int64)
        return ends - np.concatenate(([0], ends[:-1]))

    def window(self, number: int) -> list[int]:
        """The numbers of the samples in one window."""
        first, last = np.searchsorted(self._packs[:, 0], np.array([number, number + 1], dtype=np.uint64))
        found: list[int] = self._packs[first:last, 1].tolist()
        return found

    @cached_property
    def _packs(self) -> NDArray[np.uint64]:
        assert self.split.packs is not None
        return self._map(self.split.packs, "<u8").reshape(-1, 2)

    @cached_property
    def _masks(self) -> list[NDArray[Any]]:
        return [self._map(file, "u1") for file in self.split.masks]

    @cached_property
    def _shards(self) -> list[NDArray[Any]]:
        return [self._map(file, self.split.dtype) for file in self.split.shards]

    @cached_property
    def _documents(self) -> NDArray[np.uint64]:
        return self._map(self.split.document_file, "<u8").reshape(-1, 2)

    def _map(self, file: FileSum, dtype: str) -> NDArray[Any]:
        with reading(path := self.directory / file.name, _REDO):
            return np.memmap(path, dtype=dtype, mode="r")

    def document_ends(self, after: int, upto: int) -> NDArray[np.int64]:
        """The ends e (exclusive; the token before is the end-of-text) with after < e <= upto, ascending."""
        ends = self._documents[:, 0]
        first, last = np.searchsorted(ends, np.array([after, upto], dtype=np.uint64), side="right")
        return ends[first:last].astype(np.int64)

    def text_bytes(self, start: int, stop: int, skip_first: bool) -> float:
        """Bytes of text that the tokens [start, stop) stand for: a document's bytes are divided evenly among its
        tokens, without begin-of-text and end-of-text. With ``skip_first`` the first token of each document is not
        counted."""
        table = self._documents
        first = int(np.searchsorted(table[:, 0], np.uint64(start), side="right"))
        last = int(np.searchsorted(table[:, 0], np.uint64(min(stop, self.tokens)), side="left")) + 1
        rows = table[first:last].astype(np.int64)
        before = table[first - 1].astype(np.int64)[None] if first else np.zeros((1, 2), dtype=np.int64)
        begins, bytes_before = np.concatenate((before, rows[:-1])).T
        ends = rows[:, 0] - 1
        prefix = self.prefix_tokens
        counted = np.minimum(ends, stop) - np.maximum(begins + max(prefix, int(skip_first)), start)
        shares = (rows[:, 1] - bytes_before) / np.maximum(ends - begins - prefix, 1)
        return float((np.maximum(counted, 0) * shares).sum())


@dataclass(frozen=True)
class Prepared:
    """A prepared directory. ``train`` is always there; ``validation`` may be None."""

    directory: Path
    manifest: DataManifest

    @property
    def tokenizer_directory(self) -> Path:
        return self.directory / "tokenizer"

    @property
    def train(self) -> TokenStore:
        return self._store("train")

    @property
    def validation(self) -> TokenStore | None:
        return self._store("validation") if "validation" in self.manifest.splits else None

    def _store(self, name: str) -> TokenStore:
        manifest = self.manifest
        sizes = manifest.vocab_size, manifest.eot_id, manifest.prefix_tokens
        return TokenStore(self.directory, manifest.splits[name], *sizes)

    def files(self) -> Iterator[FileSum]:
        """Every file but the manifest."""
        yield from self.manifest.tokenizer_files
        for split in self.manifest.splits.values():
            yield from (*split.shards, split.document_file, *split.masks)
            if split.packs is not None:
                yield split.packs

    def verify(self) -> None:
        """Read everything and compare checksums. Raises DATA013 naming the first file that differs."""
        for file in self.files():
            path = self.directory / file.name
            if checksum(path) != file.xxh3:
                what = f"{file.name} changed since it was prepared: its xxh3 checksum does not match"
                raise DataError(Problem("DATA013", what, str(path), _REDO))


def is_prepared(directory: Path) -> bool:
    """Whether ``directory`` holds data prepared by Shardwise."""
    return (directory / MANIFEST).is_file()


@reading("the prepared data", _REDO)
def load(directory: Path, verify: bool | None = None) -> Prepared:
    """Open a prepared directory. Sizes are always checked (DATA010); contents (DATA013) if ``verify`` is true, or is
    None and the data take at most 4 GiB."""
    path = directory / MANIFEST
    if not path.is_file():
        what = f"{directory} is not prepared data: it has no {MANIFEST}"
        raise MissingInputError(Problem("DATA001", what, str(directory), "create it with shardwise data prepare"))
    prepared = Prepared(directory, _read_manifest(path))
    splits = list(prepared.manifest.splits.values())
    widths = {file.name: np.dtype(split.dtype).itemsize for split in splits for file in split.shards}
    widths |= {file.name: 1 for split in splits for file in split.masks}
    for file in prepared.files():
        _check_size(directory / file.name, file, widths.get(file.name, 16 if file.name.endswith(".bin") else 1))
    if verify is None:
        verify = sum(file.size_bytes for file in prepared.files()) <= ALWAYS_VERIFIED_BYTES
    if verify:
        prepared.verify()
    return prepared


def _check_size(path: Path, file: FileSum, width: int) -> None:
    if not path.is_file():
        raise MissingInputError(Problem("DATA001", f"{file.name} of the prepared data is missing", str(path), _REDO))
    size = path.stat().st_size
    if size != file.size_bytes:
        why = f"is not a multiple of {width}" if size % width else f"should be {file.size_bytes:,}"
        raise DataError(Problem("DATA010", f"{file.name}: size {size:,} {why}", str(path), _REDO))
