"""Does every rank read its own part of the recipe's data, and all of them together each row once, in the order of one
process? At the plan's own size, with the reader of the run, which needs no process group: of the first step, the second
as a resumed run reads it, the one in which the first epoch ends, and the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from shardwise.data.batch import MicroBatch
from shardwise.data.order import Order
from shardwise.data.pack import IGNORE, Packs, Sample, Windows
from shardwise.data.stream import Share, StepBatch, read_step, share_of, stream
from shardwise.spec.plan import Plan

LOOKED, TOKENS = 16, 2**20
"""At most so many data-parallel ranks, whose tokens of a step are read, and as many as have no more of them; two at
least. Of all ranks it is known which part of a step they read."""
COUNTED = 2**18
"""Rows of an epoch of which it is looked whether each comes once."""


@dataclass(frozen=True)
class Read:
    """The rows of a run: the ``windows`` of its data, in the order of its ``seed``, up to sample ``end``."""

    windows: Windows | Packs
    seed: int
    end: int | None


def prove(read: Read, plan: Plan, figures: dict[str, float]) -> Iterator[str]:
    """A line for each thing that is wrong."""
    count, batch = len(read.windows), plan.batch
    order, size = Order(count, read.seed), batch.global_batch_size(plan.layout.dp)
    once = np.unique(order.samples(0, min(count, COUNTED)))
    figures["rows"] = len(once)
    if len(once) != min(count, COUNTED) or once.min() < 0 or once.max() >= count:
        yield f"{min(count, COUNTED) - len(once)} of the first {min(count, COUNTED)} rows of an epoch come again in it"
    shares = shares_of(plan)
    if sorted(shares) != list(range(plan.layout.dp)):
        whose = "by the ranks whose they are"
        yield f"of {plan.layout.dp} parts of a step {len(shares.keys() - {-1})} are read {whose}, and by no others"
        return
    few = max(2, min(LOOKED, TOKENS // (size // plan.layout.dp * batch.seq_len)))
    looked = sorted({round(part * (len(shares) - 1) / (few - 1)) for part in range(few)})
    cursors = sorted({0, count // size * size, size if read.end is None else (read.end - 1) // size * size})
    for cursor, index in ((cursor, index) for cursor in cursors for index in looked):
        at = f"step {cursor // size + 1}, data-parallel rank {index}"
        steps = [read_step(read.windows, order, share, cursor, read.end) for share in shares[index]]
        last = cursor + size if read.end is None else min(cursor + size, read.end)
        places = range(cursor + index * size // plan.layout.dp, cursor + (index + 1) * size // plan.layout.dp)
        known = [int(order.samples(place, 1)[0]) for place in places if place < last]
        yield from (f"{at}: {line}" for line in _step(read.windows, known, len(places), steps))
        figures["tokens"] = figures.get("tokens", 0) + sum(len(read.windows[row].ids) for row in known)
    for index in {looked[0], looked[-1]}:
        first, second = islice(stream(read.windows, order, shares[index][0], 0, end=read.end), 2)
        again = next(stream(read.windows, order, shares[index][0], first.cursor, end=read.end))
        if not _alike(second, again):
            yield f"data-parallel rank {index}: what a resumed run reads in step 2 is not what one reads that goes on"


def shares_of(plan: Plan) -> dict[int, list[Share]]:
    """Return by data-parallel rank the parts that its ranks read, one for each context-parallel rank. Ranks that read
    another part than theirs are left out, and -1 is among the keys."""
    layout, found = plan.layout, dict[int, dict[int, Share]]()
    for rank in range(layout.world):
        place, cp = (layout.coordinate(rank, axis) for axis in ("dp_replicate", "cp"))
        data = place * layout.dp_shard + layout.coordinate(rank, "dp_shard")
        share = share_of(layout, plan.batch, rank)
        if (share.dp_rank, share.row.index) == (data, cp):
            found.setdefault(data, {})[cp] = share
        else:
            found.setdefault(-1, {})
    return {data: list(own.values()) for data, own in found.items()}


def _step(windows: Windows | Packs, known: Sequence[int], rows: int, steps: Sequence[StepBatch]) -> Iterator[str]:
    """Yield what is wrong with the ``steps`` of ranks that have tokens of the same rows: they have to read the ``known``
    ones, and padding up to so many ``rows``."""
    for step in steps:
        if step.sample_ids != list(known):
            yield f"rows {known[:4]} ... expected, {step.sample_ids[:4]} ... read"
            return
    whole = [windows[row] for row in known] + [windows.padding()] * (rows - len(known))
    found = [_rows(step.micro_batches) for step in steps]
    if sum(map(len, found)) != len(steps) * rows:
        yield f"{rows} rows expected, {len(found[0])} read"
        return
    for row, sample in enumerate(whole):
        right = np.stack([sample.ids, sample.labels, sample.positions])
        mine = np.concatenate([own[row] for own in found], axis=1)
        if not np.array_equal(_sorted(right), _sorted(mine)):
            yield f"the tokens of row {row} are not those of the data, each once"
        if wrong := _labels(sample):
            yield f"row {row}: {wrong}"


def _labels(sample: Sample) -> str | None:
    """Say what is wrong with the labels of a row: each has to be the token that follows, and in the same document,
    where documents do not see each other."""
    place = np.flatnonzero(sample.labels[:-1] != IGNORE)
    if (sample.labels[place] != sample.ids[place + 1]).any():
        return "a label is not the token that follows"
    if sum(sample.segments) != len(sample.ids):
        return "its documents are not as long as it is"
    starts = np.cumsum(sample.segments)[:-1]
    if sample.masked and (sample.labels[starts - 1] != IGNORE).any():
        return "the last token of a document has a label, of another document"
    if sample.masked and sample.positions[starts].any():
        return "positions do not begin again with a document"
    return None


def _rows(batches: Sequence[MicroBatch]) -> list[NDArray[np.int64]]:
    """Return of each row the ids, labels and positions of its tokens [3,n]."""
    parts = (np.stack([batch.ids.numpy(), batch.labels.numpy(), batch.positions.numpy()], axis=1) for batch in batches)
    return [row for part in parts for row in part]


def _sorted(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    return tokens[:, np.lexsort(tokens)]


def _alike(one: StepBatch, other: StepBatch) -> bool:
    """Say whether two steps read the same, and end at the same place."""
    pairs = zip(_rows(one.micro_batches), _rows(other.micro_batches), strict=True)
    same = one.sample_ids == other.sample_ids and one.cursor == other.cursor
    return same and all(np.array_equal(first, second) for first, second in pairs)
