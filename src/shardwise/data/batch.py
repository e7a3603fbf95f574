"""The input of one forward pass: token ids, labels that are already shifted, positions and document boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.data.pack import IGNORE, Sample
from shardwise.spec.rows import RowShare, WholeRows


@dataclass
class MicroBatch:
    """``b`` packed windows of ``s`` tokens.

    ids        [b, s] int64
    labels     [b, s] int64; ``labels[i, t]`` is the token that follows ``ids[i, t]``, or -100 if not supervised
    positions  [b, s] int64; they start again at every document when documents are masked
    documents  [n + 1] int32 cumulative boundaries of the segments over the ``b * s`` tokens laid row after row, 0 and
               ``b * s`` and every row's end included; None when each row is one segment
    longest    tokens in the longest segment
    answers    [b, s] int64, of pairs of answers: 2p for the tokens of pair p's chosen answer, 2p + 1 for its rejected
               one's, and any for padding; else None
    references [p, 2] float64: log p(chosen) and log p(rejected) of each pair under the initial model
    row_length of rows of which a rank has some tokens (``s`` is their number), that of the whole ones, which
               ``documents`` and ``longest`` are of; None: rows are whole
    bounds     ``documents`` of such rows, on the host
    reached    [b, s] int64, of such rows how long the document is that each token is in; else None
    filled     [b] int64: how many tokens of each row are more than padding at its end; None: all, or rows are not whole
    counts     whether this rank counts pairs and bytes of text, as one does of those with tokens of the same rows
    """

    ids: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor | None
    longest: int
    answers: Tensor | None = None
    references: Tensor | None = None
    row_length: int | None = None
    bounds: Tensor | None = None
    reached: Tensor | None = None
    counts: bool = True
    filled: Tensor | None = None

    def to(self, device: torch.device | str) -> MicroBatch:
        """A copy on ``device``, asynchronous if the memory is pinned."""
        moved: dict[str, Any] = {name: value.to(device, non_blocking=True) for name, value in self.tensors().items()}
        return replace(self, **moved)

    def pinned(self) -> MicroBatch:
        """A copy in pinned memory."""
        pinned: dict[str, Any] = {name: value.pin_memory() for name, value in self.tensors().items()}
        return replace(self, **pinned)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are not None and may be on the device, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor) and name != "bounds"}

    def supervised_tokens(self) -> int:
        """The number of labels that are trained on."""
        return int((self.labels != IGNORE).sum())

    def terms(self) -> int:
        """Return how many supervised labels, or pairs of answers, the loss is a mean over."""
        return self.supervised_tokens() if self.references is None else len(self.references) * self.counts

    def cut(self, share: RowShare) -> MicroBatch:
        """The tokens that a rank has of these rows."""
        if share.ranks == 1:
            return self
        bounds, length = None if self.documents is None else self.documents.cpu(), self.ids.shape[1]
        rows = WholeRows(length, None if bounds is None else tuple(bounds.tolist()))
        runs = [share.runs(rows, row) for row in range(len(self.ids))]
        places = torch.tensor([[place for run in row for place in range(*run)] for row in runs])
        reached = torch.tensor([_reached(rows, row, places[row].tolist()) for row in range(len(runs))])
        held = self.tensors()
        kept: dict[str, Any] = {name: held[name].gather(1, places) for name in _BY_TOKEN if name in held}
        whole: dict[str, Any] = {"row_length": length, "bounds": bounds}
        return replace(self, **kept, **whole, reached=reached, counts=share.index == 0, filled=None)


_BY_TOKEN = ("ids", "labels", "positions", "answers")


def collate(samples: Sequence[Sample]) -> MicroBatch:
    """Stack windows of equal length."""
    lengths = [length for sample in samples for length in sample.segments]
    rows = zip(*((sample.ids, sample.labels, sample.positions) for sample in samples), strict=True)
    ids, labels, positions = (torch.stack([torch.from_numpy(row) for row in part]) for part in rows)
    documents = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) if samples[0].masked else None
    padded = any(sample.padding for sample in samples)
    filled = torch.tensor([len(sample.ids) - sample.padding for sample in samples]) if padded else None
    return MicroBatch(ids, labels, positions, documents, max(lengths), *_pairs(samples), filled=filled)


def _reached(rows: WholeRows, row: int, places: Sequence[int]) -> list[int]:
    """Return the length of the document that each of these tokens of a row is in."""
    ends = np.array(rows.ends(row))
    lengths = np.diff(ends, prepend=0)
    found: list[int] = lengths[np.searchsorted(ends, places, side="right")].tolist()
    return found


def _pairs(samples: Sequence[Sample]) -> tuple[Tensor | None, Tensor | None]:
    """``answers`` and ``references`` of windows whose documents are chosen, rejected, chosen ... and padding."""
    known = [sample.references for sample in samples if sample.references is not None]
    if not known:
        return None, None
    rows, before = [], 0
    for sample, references in zip(samples, known, strict=True):
        numbers = np.zeros(len(sample.segments), dtype=np.int64)
        numbers[: 2 * len(references)] = before + np.arange(2 * len(references))
        rows.append(torch.from_numpy(np.repeat(numbers, sample.segments)))
        before += 2 * len(references)
    return torch.stack(rows), torch.from_numpy(np.concatenate(known))
