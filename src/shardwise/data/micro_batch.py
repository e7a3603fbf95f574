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
    following  [b, s] int64, where a layer predicts a further token: the id behind each; 0 where there is none in its
               segment
    targets    [b, s, 2] int64, then: ``labels``, and of each token the label of the one behind it in its segment
    further    how many of the second ones there are
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
    following: Tensor | None = None
    targets: Tensor | None = None
    further: int = 0

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

    def looking_ahead(self) -> MicroBatch:
        """The whole rows with ``following`` and ``targets``. What follows a row's last token its label says; no target
        is of another document, where documents are told apart."""
        ends, within = torch.zeros_like(self.ids, dtype=torch.bool), torch.zeros_like(self.ids, dtype=torch.bool)
        if self.documents is not None:
            ends.view(-1)[self.documents[1:].long() - 1] = True
            within[:, :-1] = ends[:, :-1]
        ends[:, -1] = True
        behind = self.ids.roll(-1, 1)
        behind[:, -1] = self.labels[:, -1]
        behind = behind.masked_fill(ends & (self.labels == IGNORE), 0)
        further = self.labels.roll(-1, 1).masked_fill(ends | within.roll(-1, 1), IGNORE)
        return self.aimed(behind, torch.stack([self.labels, further], -1))

    def aimed(self, following: Tensor, targets: Tensor) -> MicroBatch:
        """The rows with these, of which the targets are counted."""
        return replace(self, following=following, targets=targets, further=int((targets[..., 1] != IGNORE).sum()))

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
        made = replace(self, **kept, **whole, reached=reached, counts=share.index == 0, filled=None)
        if self.targets is None or made.following is None:
            return made
        return made.aimed(made.following, self.targets.gather(1, places.unsqueeze(-1).expand(-1, -1, 2)))


_BY_TOKEN = ("ids", "labels", "positions", "answers", "following")


def collate(samples: Sequence[Sample], *, ahead: bool = False) -> MicroBatch:
    """Stack windows of equal length; ``ahead``: for a model with a layer that predicts a further token."""
    lengths = [length for sample in samples for length in sample.segments]
    rows = zip(*((sample.ids, sample.labels, sample.positions) for sample in samples), strict=True)
    ids, labels, positions = (torch.stack([torch.from_numpy(row) for row in part]) for part in rows)
    documents = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) if samples[0].masked else None
    padded = any(sample.padding for sample in samples)
    filled = torch.tensor([len(sample.ids) - sample.padding for sample in samples]) if padded else None
    batch = MicroBatch(ids, labels, positions, documents, max(lengths), *_pairs(samples), filled=filled)
    return batch.looking_ahead() if ahead else batch


def _reached(rows: WholeRows, row: int, places: Sequence[int]) -> list[int]:
    """Return the length of the document that each of these tokens of a row is in."""
    ends = np.array(rows.ends(row))
    lengths = np.diff(ends, prepend=0)
    return lengths[np.searchsorted(ends, places, side="right")].tolist()


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
