"""What one forward pass reads: token ids, labels that are already shifted, positions and document boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from shardwise.data.pack import IGNORE, Sample


@dataclass
class MicroBatch:
    """``b`` packed windows of ``s`` tokens.

    ids        [b, s] int64
    labels     [b, s] int64; ``labels[i, t]`` is the token that follows ``ids[i, t]``, or -100 where nothing is learnt
    positions  [b, s] int64; they start again at every document when documents are masked
    documents  [n + 1] int32 cumulative boundaries of the segments over the ``b * s`` tokens laid row after row, 0 and
               ``b * s`` and every row's end included; None when each row is one segment
    longest    tokens in the longest segment
    """

    ids: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor | None
    longest: int

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on ``device``; asynchronous where the memory is pinned."""
        return MicroBatch(
            self.ids.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.positions.to(device, non_blocking=True),
            None if self.documents is None else self.documents.to(device, non_blocking=True),
            self.longest,
        )

    def supervised_tokens(self) -> int:
        """Labels that are learnt."""
        return int((self.labels != IGNORE).sum())


def collate(samples: Sequence[Sample]) -> MicroBatch:
    """Lay windows of one length under each other."""
    lengths = [length for sample in samples for length in sample.segments]
    documents = None
    if samples[0].masked:
        documents = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return MicroBatch(
        ids=torch.stack([torch.from_numpy(sample.ids) for sample in samples]),
        labels=torch.stack([torch.from_numpy(sample.labels) for sample in samples]),
        positions=torch.stack([torch.from_numpy(sample.positions) for sample in samples]),
        documents=documents,
        longest=max(lengths),
    )
