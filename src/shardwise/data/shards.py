"""The making of token shards from units of text: several processes tokenise, one writes, in the order of the units."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import connection, get_context, parent_process
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardwise.data import binary, bins
from shardwise.data.conversations import Encoded
from shardwise.data.faults import MOST, BadRecord, BadRecords, Faults
from shardwise.data.read import SourcePart, pieces
from shardwise.data.samples import SampleRules, encode, tokenizer_of
from shardwise.data.source import reading
from shardwise.data.store import FileSum, Split
from shardwise.errors import DataError, Problem
from shardwise.spec.safe_path import safe_path, without_main

SHARD_TOKENS = 2**27
_FURTHER_UNITS = 64
"""So many more units (128 MiB) are read after the first one with bad records, to report theirs too."""


@dataclass(frozen=True)
class TokenizeSettings:
    """The settings by which units are tokenised. ``splits``: the split of ordinary documents, and that of documents
    held out while reading. ``rules``: how records become samples for fine-tuning; None: text becomes documents.
    ``skip``: bad records are left out."""

    tokenizer_directory: Path
    text_key: str
    share: float
    splits: tuple[str, str]
    rules: SampleRules | None = None
    skip: bool = False


@dataclass(frozen=True)
class SplitPart:
    """A unit's part of one split: ids, and for each document that ends in it, (tokens, bytes of text) from the start of
    the unit to the end of the document. ``text_bytes`` includes a document that does not end here. For samples there
    are also ``masks``, one byte per id, a hash of each sample, and the counts of each outcome."""

    ids: NDArray[np.int64]
    documents: NDArray[np.uint64]
    text_bytes: int
    empty: int
    masks: NDArray[np.uint8]
    hashes: tuple[int, ...]
    counts: Counter[str]


@reading()
def tokenise(unit: Sequence[SourcePart], job: TokenizeSettings) -> dict[str, SplitPart]:
    """Read and tokenise one unit. A pure function of the files' bytes and the tokenizer. Raises BadRecords."""
    faults = Faults(job.skip)
    gathered = {name: _Gathered() for name in job.splits}
    tokenizer = tokenizer_of(job.tokenizer_directory)
    for part in unit:
        if job.rules is not None:
            for held_out, sample in encode(part, job.tokenizer_directory, job.rules, job.share, faults):
                gathered[job.splits[int(held_out)]].add(sample)
            continue
        if part.source.kind == "ids":
            gathered[job.splits[0]].add_ids(*binary.documents(part, tokenizer.eot_id, tokenizer.vocab_size))
            continue
        opened = part.continues
        for piece in pieces(part, job.text_key, job.share, faults):
            target = gathered[job.splits[int(piece.held_out)]]
            ids = tokenizer.encode([piece.text])[0]
            if ids and not opened:
                target.take(tokenizer.prefix)
                opened = True
            target.take(ids)
            target.text_bytes += len(piece.text.encode())
            if piece.last:
                target.close(tokenizer.eot_id if opened else None)
                opened = False
    faults.raise_found()
    gathered[job.splits[0]].counts.update(faults.counts)
    return {name: g.run() for name, g in gathered.items()}


class _Gathered:
    def __init__(self) -> None:
        self.ids = [np.empty(0, dtype=np.int64)]
        self.masks = [np.empty(0, dtype=np.uint8)]
        self.documents: list[tuple[int, int]] = []
        self.tokens = self.text_bytes = self.empty = 0
        self.hashes: list[int] = []
        self.counts: Counter[str] = Counter()

    def take(self, ids: Sequence[int] | NDArray[np.int64]) -> None:
        self.ids.append(np.asarray(ids, dtype=np.int64))
        self.tokens += len(ids)

    def add(self, sample: Encoded) -> None:
        """One sample for supervised fine-tuning."""
        self.take(sample.ids)
        self.masks.append(sample.supervised)
        self.text_bytes += sample.text_bytes
        self.documents.append((self.tokens, self.text_bytes))
        self.hashes.append(xxhash.xxh3_64_intdigest(sample.ids.tobytes()))

    def add_ids(self, ids: NDArray[np.int64], ends: NDArray[np.int64], empty: int) -> None:
        """Add documents that are token ids already; their text is unknown."""
        self.documents += [(self.tokens + end, self.text_bytes) for end in ends.tolist()]
        self.take(ids)
        self.empty += empty

    def close(self, eot_id: int | None) -> None:
        """End a document; None: it was empty, and is not counted as one."""
        if eot_id is None:
            self.empty += 1
        else:
            self.take([eot_id])
            self.documents.append((self.tokens, self.text_bytes))

    def run(self) -> SplitPart:
        documents = np.array(self.documents, dtype=np.uint64).reshape(-1, 2)
        ids, masks = np.concatenate(self.ids), np.concatenate(self.masks)
        return SplitPart(ids, documents, self.text_bytes, self.empty, masks, tuple(self.hashes), self.counts)


def tokenise_all(
    units: Sequence[tuple[Sequence[SourcePart], TokenizeSettings]], num_proc: int
) -> Iterator[dict[str, SplitPart]]:
    """Results in the order of ``units``, a few units ahead at most, from ``num_proc`` processes. After a unit with bad
    records a limited number of others is read, to report theirs too (BadRecords)."""
    found: list[BadRecord] = []
    bad_units = 0
    for result in _results(units, num_proc):
        try:
            run = result()
        except BadRecords as error:
            found += error.found
        except BrokenProcessPool as error:
            what = f"one of {num_proc} tokenising processes died; the system may have killed it for lack of memory"
            fix = f"data.num_proc={max(num_proc // 2, 1)}"
            raise DataError(Problem("DATA014", what, "data.num_proc", fix)) from error
        bad_units += bool(found)
        if not found:
            yield run
        elif len(found) >= MOST or bad_units > _FURTHER_UNITS:
            break
    if found:
        raise BadRecords(*found)


def _results(
    units: Sequence[tuple[Sequence[SourcePart], TokenizeSettings]], num_proc: int
) -> Iterator[Callable[[], dict[str, SplitPart]]]:
    if num_proc == 1 or len(units) <= 1:
        yield from (partial(tokenise, unit, job) for unit, job in units)
        return
    with safe_path():  # the pool has a process that looks after its locks
        pool = ProcessPoolExecutor(min(num_proc, len(units)), get_context("spawn"), die_with_parent)
    ahead: deque[Future[dict[str, SplitPart]]] = deque()
    try:
        for unit, job in units:
            with safe_path(), without_main():  # this may start one that works
                ahead.append(pool.submit(tokenise, unit, job))
            if len(ahead) > 2 * num_proc:
                yield ahead.popleft().result
        while ahead:
            yield ahead.popleft().result
    finally:
        pool.shutdown(cancel_futures=True)


def die_with_parent() -> None:
    """Have this worker exit when its parent ends for any reason, and ignore Ctrl-C, which the parent handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        parent = parent_process()
        if parent is not None:
            connection.wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class SplitWriter(AbstractContextManager["SplitWriter"]):
    """Writes the shards and document boundaries of one split into ``directory/name``, with checksums, and syncs
    them."""

    def __init__(self, directory: Path, name: str, vocab_size: int) -> None:
        self.dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        self.directory = directory
        self.name = name
        self.shards: list[_File] = []
        (directory / name).mkdir()
        self.boundaries = _File(directory, f"{name}/documents.bin")
        self.tokens = self.documents = self.text_bytes = self.empty = 0
        self.masks: list[_File] = []
        self.supervised_tokens = 0
        self.hashes: set[int] = set()
        self.counts: Counter[str] = Counter()

    def __exit__(self, *error: object) -> None:
        for part in (*self.shards, *self.masks, self.boundaries):
            part.file.close()

    def add(self, run: SplitPart) -> None:
        documents = run.documents + np.array([self.tokens, self.text_bytes], dtype=np.uint64)
        self.boundaries.write(documents.astype("<u8").tobytes())
        self._write(self.shards, "tokens", run.ids.astype(self.dtype))
        self._write(self.masks, "mask", run.masks)
        self.tokens += run.ids.size
        self.supervised_tokens += int(run.masks.sum())
        self.hashes.update(run.hashes)
        self.counts.update(run.counts)
        self.documents += len(documents)
        self.text_bytes += run.text_bytes
        self.empty += run.empty

    def _write(self, files: list[_File], kind: str, values: NDArray[np.generic]) -> None:
        """Append one value per token, in files of ``SHARD_TOKENS`` values each."""
        at = self.tokens
        while values.size:
            if at % SHARD_TOKENS == 0:
                files.append(_File(self.directory, f"{self.name}/{kind}-{len(files):05}.bin"))
            room = SHARD_TOKENS - at % SHARD_TOKENS
            files[-1].write(values[:room].tobytes())
            values, at = values[room:], at + room

    def close(self, rules: SampleRules | None = None) -> Split:
        """Finish the files; with ``rules``, pack the samples into windows."""
        shards = tuple(shard.close() for shard in self.shards)
        boundaries = self.boundaries.close()
        counts = self.tokens, self.documents, self.text_bytes
        if rules is None or not self.documents:
            return Split(*counts, self.dtype.str, SHARD_TOKENS, shards, boundaries)
        masks = tuple(mask.close() for mask in self.masks)
        ends = np.fromfile(self.directory / boundaries.name, dtype="<u8").reshape(-1, 2)[:, 0].astype(np.int64)
        lengths = np.diff(ends, prepend=0)
        together = lengths.reshape(-1, 2).sum(1) if rules.pairs else lengths
        windows = bins.pack(together, rules.seq_len) if rules.packing else np.arange(len(together))
        windows = np.repeat(windows, 2) if rules.pairs else windows
        order = np.argsort(windows, kind="stable")
        packs = _File(self.directory, f"{self.name}/packs.bin")
        packs.write(np.stack([windows[order], order], axis=1).astype("<u8").tobytes())
        made = int(windows.max()) + 1
        split = Split(*counts, self.dtype.str, SHARD_TOKENS, shards, boundaries, masks, packs.close(), made)
        return replace(split, supervised_tokens=self.supervised_tokens, pairs=rules.pairs)


class _File:
    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.file = (directory / name).open("xb")
        self.digest = xxhash.xxh3_128()

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.digest.update(data)

    def close(self) -> FileSum:
        with self.file:
            self.file.flush()
            os.fsync(self.file.fileno())
            return FileSum(self.name, self.file.tell(), self.digest.hexdigest())
