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
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from shardwise.data.source import digest, reading
from shardwise.data.sums import SourceFacts, checksum
from shardwise.errors import DataError, MissingInputError, Problem, first_line
from shardwise.spec.complaints import show_value
from shardwise.spec.files import MANIFEST_BYTES, NOTE_BYTES, inside, read_regular
from shardwise.spec.record import Count, from_json

FORMAT = 1
MANIFEST = "manifest.json"
ALWAYS_VERIFIED_BYTES = 4 * 2**30
"""Data of at most this size are verified whenever they are opened (about a second). Verifying more would delay every
start."""


@dataclass(frozen=True)
class FileSum:
    """One file of a prepared directory: its relative name, its size, and the xxh3-128 hash of its bytes."""

    name: str
    size_bytes: Count
    xxh3: str


@dataclass(frozen=True)
class Split:
    """The manifest's record of ``train`` or ``validation``. ``text_bytes`` counts the UTF-8 bytes of the documents, or
    of the supervised text of samples for fine-tuning. Only such samples have ``masks``, ``packs``, ``windows`` and
    ``supervised_tokens``; with ``pairs``, every two samples are a pair of answers."""

    tokens: Count
    documents: Count
    text_bytes: Count
    dtype: Annotated[str, Field(pattern="^<u[24]$")]
    shard_tokens: Annotated[int, Field(gt=0, lt=2**63)]
    shards: tuple[FileSum, ...]
    document_file: FileSum
    masks: tuple[FileSum, ...] = ()
    packs: FileSum | None = None
    windows: Count = 0
    supervised_tokens: Count = 0
    pairs: bool = False

    def contradiction(self, seq_len: int | None) -> str | None:
        """Return what in it cannot be so, or not with samples of windows of ``seq_len`` tokens; None if all fits."""
        packed, width = self.packs is not None, np.dtype(self.dtype).itemsize
        if packed != (seq_len is not None) or (not packed and (self.masks or self.windows or self.pairs)):
            return "it is of samples in windows, and of text"
        for files, each in ((self.shards, width), (self.masks, 1)) if packed else ((self.shards, width),):
            if sum(file.size_bytes for file in files) != self.tokens * each:
                return f"its files have another size than {self.tokens:,} tokens of {each} bytes"
            if any(file.size_bytes != self.shard_tokens * each for file in files[:-1]):
                return f"a file that is not the last holds another number of tokens than {self.shard_tokens:,}"
            if files and files[-1].size_bytes > self.shard_tokens * each:
                return f"a file holds more than {self.shard_tokens:,} tokens"
        for table in filter(None, (self.document_file, self.packs)):
            if table.size_bytes != 16 * self.documents:
                return f"{table.name} has another size than {self.documents:,} documents of 16 bytes"
        if self.supervised_tokens > self.tokens or self.windows > self.documents or (self.pairs and self.documents % 2):
            return "its supervised tokens, windows or pairs are more than there can be"
        if seq_len is not None and self.tokens > self.windows * seq_len:
            return f"{self.tokens:,} tokens do not fit into {self.windows:,} windows of {seq_len:,}"
        return None

    @property
    def records(self) -> int:
        """Documents or samples; of pairs, the two answers are one."""
        return self.documents // 2 if self.pairs else self.documents


@dataclass(frozen=True)
class DataManifest:
    """A record of what a prepared directory holds and what it was made from. ``fingerprint`` covers the sources' names,
    sizes and contents, the settings and the tokenizer: equal fingerprints mean equal tokens in equal order.
    ``settings`` are for people to read. ``seq_len``: of samples packed into windows; ``counts``: what became of records
    on the way; ``prefix_tokens``: how many tokens that stand for no text each document begins with."""

    fingerprint: str
    tokenizer_hash: str
    vocab_size: Annotated[int, Field(gt=0, lt=2**32)]
    eot_id: Count
    splits: dict[Annotated[str, Field(pattern="^(train|validation)$")], Split]
    tokenizer_files: tuple[FileSum, ...]
    files: tuple[SourceFacts, ...]
    settings: dict[str, Any]
    empty_documents: Count = 0
    format: Count = FORMAT
    counts: dict[str, Count] = field(default_factory=dict)
    seq_len: Annotated[int, Field(gt=0, lt=2**32)] | None = None
    prefix_tokens: Count = 0

    def contradiction(self) -> str | None:
        """Return what in it cannot be so; None if all fits."""
        if "train" not in self.splits:
            return "it has no train split"
        if self.eot_id >= self.vocab_size:
            return f"its end-of-text has the id {self.eot_id} of {self.vocab_size}"
        if "tokenizer/tokenizer.json" not in {file.name for file in self.tokenizer_files}:
            return "it lists no tokenizer"
        return next(filter(None, (split.contradiction(self.seq_len) for split in self.splits.values())), None)


def write_manifest(directory: Path, manifest: DataManifest) -> None:
    """Write ``manifest.json`` with its own checksum."""
    body = asdict(manifest)
    body["checksum"] = digest(body)
    (directory / MANIFEST).write_text(json.dumps(body, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _read_manifest(path: Path) -> DataManifest:
    def damaged(why: str) -> DataError:
        return DataError(Problem("DATA013", f"the manifest of the prepared data is damaged: {why}", str(path), _REDO))

    try:
        text = read_regular(path, MANIFEST_BYTES)
        body = json.loads(text)
        stored = body.pop("checksum")
        summed = digest(body)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise damaged("it is not the JSON that was written") from error
    if stored != summed:
        raise damaged("its checksum does not match")
    if body.get("format") != FORMAT:
        raise damaged(f"it has format {show_value(body.get('format'))}, this version reads {FORMAT}")
    try:
        manifest = from_json(DataManifest, text)
        for file in Prepared(path.parent, manifest).files():
            inside(path.parent, file.name, path)
    except (ValueError, OSError, RuntimeError) as error:  # of a name: too long, with a zero byte, links in a circle
        raise damaged(first_line(error)) from error
    if why := manifest.contradiction():
        raise damaged(why)
    return manifest


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
        self.check(0 <= begin <= end <= self.tokens, self.split.document_file)
        return begin, end, text_bytes - bytes_before

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document or sample."""
        ends = self._documents[:, 0].astype(np.int64)
        lengths = ends - np.concatenate(([0], ends[:-1]))
        self.check(bool((lengths >= 0).all()) and int(lengths.sum()) == self.tokens, self.split.document_file)
        return lengths

    def window(self, number: int) -> list[int]:
        """The numbers of the samples in one window. Raises DATA013 for samples that there are not."""
        assert self.split.packs is not None
        first, last = np.searchsorted(self._packs[:, 0], np.array([number, number + 1], dtype=np.uint64))
        found: list[int] = self._packs[first:last, 1].tolist()
        sound = len(found) > 0 and max(found) < self.split.documents
        self.check(sound and not (self.split.pairs and len(found) % 2), self.split.packs)
        return found

    def check(self, sound: bool, file: FileSum) -> None:
        """Raise DATA013 unless what was read of ``file`` is sound: data too large to be read whole when they are opened
        are not compared with their checksums."""
        if not sound:
            what = f"{file.name} changed since it was prepared: it contradicts the tokens"
            raise DataError(Problem("DATA013", what, str(self.directory / file.name), _REDO))

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
        found = ends[first:last].astype(np.int64)
        edges = np.concatenate(([after], found, [upto]))
        self.check(first <= last and bool((np.diff(edges) >= 0).all()), self.split.document_file)
        return found

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
    """Return whether ``directory`` holds data prepared by Shardwise."""
    return (directory / MANIFEST).is_file()


def noted(note: Path, cache: Path) -> Path | None:
    """The prepared data that a note names by their fingerprint; None where it, or they, cannot be found."""
    with suppress(OSError, ValueError):
        name = read_regular(note, NOTE_BYTES).decode()
        if re.fullmatch("[0-9a-f]{32}", name) and is_prepared(known := cache / "data" / name):
            return known
    return None


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
