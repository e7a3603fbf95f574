"""Packing: documents, each closed by end-of-text, laid end to end and cut into windows.

Window k reads the tokens [k * seq_len, k * seq_len + seq_len] of the stream: ``seq_len`` inputs, and the same moved
by one as labels. So every step from one token to the next is in exactly one window, and window k is a pure function
of the prepared data and seq_len. The last window is filled up with end-of-text; it has no supervised tokens.

With ``mask_documents`` a token sees its own document only: attention stops at the document's start, positions start
again at 0 (also where a window begins in the middle of a document), and the label of the end-of-text position is
masked, since what follows it is another text. Without, a window is one sequence, and the first token of a document is
supervised from the end of the one before.

Samples for supervised fine-tuning are not cut: preparation lays whole ones into windows (``bins.py``), each a document
of its own, and only tokens marked as supervised are labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwise.data.store import TokenStore

IGNORE = -100


@dataclass(frozen=True)
class Sample:
    """One window. ``ids``, ``labels`` (-100: not trained on) and ``positions`` are [seq_len] int64; ``segments`` are
    the lengths of the pieces of documents in it (they sum to seq_len); ``masked``: the pieces do not see each other.
    ``references``: of a window of pairs, whose answers are its first documents, what the initial model says of each
    (``Packs``). ``padding``: how many tokens at its end only fill it up."""

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    segments: tuple[int, ...]
    masked: bool
    references: NDArray[np.float64] | None = None
    padding: int = 0


@dataclass(frozen=True)
class Windows:
    """The windows of a prepared text. ``windows[k]`` reads only that window from the disk."""

    store: TokenStore
    seq_len: int
    mask_documents: bool = True

    def __len__(self) -> int:
        return (max(self.store.tokens - 1, 0) + self.seq_len - 1) // self.seq_len

    def __getitem__(self, k: int) -> Sample:
        if not 0 <= k < len(self):
            raise IndexError(f"window {k} of {len(self)}")
        start = k * self.seq_len
        tokens = self.store.read(start, start + self.seq_len + 1)
        sample = self.padding()
        sample.ids[: len(tokens)] = tokens[: self.seq_len]
        sample.labels[: len(tokens) - 1] = tokens[1:]
        sample = replace(sample, padding=max(self.seq_len - len(tokens), 0))
        if not self.mask_documents:
            return sample
        ends = self.store.document_ends(start, start + self.seq_len) - start
        sample.labels[ends - 1] = IGNORE
        starts = np.unique(np.concatenate(([0], ends, [len(tokens)])))
        starts = starts[starts < self.seq_len]
        segments = np.diff(starts, append=self.seq_len)
        positions = sample.positions - np.repeat(starts, segments)
        return replace(sample, positions=positions, segments=tuple(segments.tolist()))

    def text_bytes(self, k: int) -> float:
        """Bytes of text that window k's labels stand for: a document's bytes are shared out evenly over its tokens
        but end-of-text. Tokens that are no label (with masking, the first of each document) are not counted."""
        start = k * self.seq_len
        return self.store.text_bytes(start + 1, start + self.seq_len + 1, skip_first=self.mask_documents)

    def padding(self) -> Sample:
        """A window without supervised tokens: padding where every rank must have equally many."""
        return _padding(self.store, self.seq_len, self.mask_documents)


@dataclass(frozen=True)
class Packs:
    """The windows of prepared samples, each of several whole samples and some end-of-text to fill up. ``reference``: of
    each pair of answers log p(chosen) and log p(rejected) under the initial model [p, 2]; 0 where None."""

    store: TokenStore
    seq_len: int
    reference: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return self.store.split.windows

    def __getitem__(self, k: int) -> Sample:
        if not 0 <= k < len(self):
            raise IndexError(f"window {k} of {len(self)}")
        sample = _padding(self.store, self.seq_len, masked=True)
        lengths: list[int] = []
        at = 0
        for index in self.store.window(k):
            begin, end, _ = self.store.sample(index)
            tokens, learnt = self.store.read(begin, end), self.store.read_mask(begin, end)
            self.store.check(0 < len(tokens) <= self.seq_len - at, self.store.split.document_file)
            sample.ids[at : at + len(tokens)] = tokens
            sample.labels[at : at + len(tokens) - 1] = np.where(learnt[1:], tokens[1:], IGNORE)
            lengths.append(len(tokens))
            at += len(tokens)
        if at < self.seq_len:
            lengths.append(self.seq_len - at)
        positions = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
        references = None
        if self.store.split.pairs:
            pairs = self.pairs(k)
            references = np.zeros((len(pairs), 2)) if self.reference is None else self.reference[pairs]
        padding = self.seq_len - at
        return replace(sample, positions=positions, segments=tuple(lengths), references=references, padding=padding)

    def pairs(self, k: int) -> list[int]:
        """The numbers of the pairs in window k."""
        return [index // 2 for index in self.store.window(k)[::2]]

    def text_bytes(self, k: int) -> float:
        """Bytes of text that window k's labels stand for."""
        return float(sum(self.store.sample(index)[2] for index in self.store.window(k)))

    def padding(self) -> Sample:
        """A window without supervised tokens."""
        made = _padding(self.store, self.seq_len, masked=True)
        return replace(made, references=np.zeros((0, 2))) if self.store.split.pairs else made


def _padding(store: TokenStore, seq_len: int, masked: bool) -> Sample:
    ids = np.full(seq_len, store.eot_id, dtype=np.int64)
    labels = np.full(seq_len, IGNORE, dtype=np.int64)
    return Sample(ids, labels, np.arange(seq_len, dtype=np.int64), (seq_len,), masked, padding=seq_len)


def open_windows(store: TokenStore, seq_len: int, mask_documents: bool) -> Windows | Packs:
    """Return the windows of a prepared split that a run reads: cut from text, or of packed samples."""
    return Windows(store, seq_len, mask_documents) if store.split.packs is None else Packs(store, seq_len)
