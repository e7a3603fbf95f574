"""Does every rank read its own part of the recipe's data, all of them together each row once, and each row as it is
stored? With the reader of the run, which needs no process group, at the plan's own size: of the first step, the second
as a resumed run reads it, the one in which the first epoch ends, and the last of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from shardwise.data.order import Order
from shardwise.data.pack import IGNORE, Packs, Windows
from shardwise.data.stream import Share, StepBatch, read_step, share_of, stream
from shardwise.spec.plan import Batch, Plan
from shardwise.spec.rows import WholeRows

LOOKED, TOKENS = 16, 2**20
"""At most so many data-parallel ranks, whose tokens of a step are read, and as many as have no more of them; two at
least. Of all ranks it is known which part of a step they read."""
COUNTED = 2**18
"""Rows of the first epoch of which it is looked whether each comes once."""
NOWHERE = -7
"""In the place of a token that no rank has read."""


@dataclass(frozen=True)
class Read:
    """The rows of a run: the ``windows`` of its data, in the order of its ``seed``, up to sample ``end`` (None: again
    and again), in so many ``steps``."""

    windows: Windows | Packs
    seed: int
    end: int | None
    steps: int


@dataclass(frozen=True)
class StoredRow:
    """The ids, labels and positions of a row, and where its documents begin, if they do not see each other."""

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    starts: list[int]

    @property
    def learnt(self) -> int:
        """The number of its labels."""
        return int((self.labels != IGNORE).sum())


def few(plan: Plan) -> Batch:
    """Return the plan's batch with as many micro-batches as have no more than ``TOKENS`` on a rank; one at least."""
    batch = plan.batch
    most = max(1, TOKENS // (batch.micro_batch_size * batch.seq_len))
    return replace(batch, accumulation=min(batch.accumulation, most))


def prove(read: Read, plan: Plan, figures: dict[str, float]) -> Iterator[str]:
    """Yield a line for each thing that is wrong."""
    count, batch = len(read.windows), few(plan)
    order = Order(count, read.seed)
    size = batch.global_batch_size(plan.layout.dp)
    ranks = plan.layout.dp
    first = order.samples(0, min(count, COUNTED))
    figures["rows"], figures["of ranks"] = len(first), ranks
    if len(np.unique(first)) != len(first) or first.min() < 0 or first.max() >= count:
        yield f"the first {len(first)} rows of an epoch are not so many different ones of {count}"
    shares = dict[int, list[Share]]()
    for rank in range(plan.layout.world):
        data, cp = _place(plan, rank)
        share = share_of(plan.layout, batch, rank)
        if (share.dp_rank, share.dp, share.row.index) != (data, ranks, cp):
            wrong = f"part {share.dp_rank} of {share.dp} and tokens {share.row.index} of each row"
            yield f"rank {rank} reads {wrong} where part {data} of {ranks} and tokens {cp} are its own"
            return
        own = shares.setdefault(data, [])
        own += [share] * (share not in own)
    looked = max(2, min(LOOKED, TOKENS // (size // ranks * batch.seq_len)))
    chosen = sorted({round(part * (ranks - 1) / (looked - 1)) for part in range(looked)})
    end = read.steps * size if read.end is None else min(read.end, read.steps * size)
    ends = {0, (count - 1) // size * size, (end - 1) // size * size}
    cursors = sorted(cursor for cursor in ends if cursor < end)
    figures["ranks"], labels = len(chosen), 0
    for cursor, data in ((cursor, data) for cursor in cursors for data in chosen):
        steps = [read_step(read.windows, order, share, cursor, read.end) for share in shares[data]]
        begin, last = cursor + data * size // ranks, cursor + size if read.end is None else read.end
        known = order.samples(begin, max(0, min(size // ranks, last - begin))).tolist()
        rows = [stored(read.windows, row) for row in known]
        at = f"step {cursor // size + 1}, data-parallel rank {data}"
        found = [_joined(shares[data], steps, row) for row in range(size // ranks)]
        yield from (f"{at}: {line}" for line in _step(read.windows, known, rows, found, steps))
        labels += sum(row.learnt for row in rows)
        figures["tokens"] = figures.get("tokens", 0) + len(rows) * batch.seq_len
    if not labels:
        yield "no row that was looked at has a token that is learnt"
    for share in {shares[data][place] for data in (chosen[0], chosen[-1]) for place in (0, -1)}:
        one, other = islice(stream(read.windows, order, share, 0, end=read.end), 2)
        if not _alike(other, next(stream(read.windows, order, share, one.cursor, end=read.end))):
            yield f"data-parallel rank {share.dp_rank}: a resumed run reads another step 2 than one that goes on"


def _place(plan: Plan, rank: int) -> tuple[int, int]:
    """Return the number of a rank among those that read other rows, and among those with other tokens of the same."""
    replica, shard, cp = (plan.layout.coordinate(rank, axis) for axis in ("dp_replicate", "dp_shard", "cp"))
    return replica * plan.layout.dp_shard + shard, cp


def stored(windows: Windows | Packs, number: int) -> StoredRow:
    """Return a row by what the store holds: tokens that follow each other, or whole samples, of which some tokens are
    learnt; and end-of-text."""
    store, length = windows.store, windows.seq_len
    ids = np.full(length, store.eot_id)
    labels = np.full(length, IGNORE)
    at = 0
    if isinstance(windows, Windows):
        begin = number * length
        tokens = store.read(begin, begin + length + 1)
        at = min(length, len(tokens))
        ids[:at], labels[: len(tokens) - 1], starts = tokens[:length], tokens[1:], [0]
        if windows.mask_documents:
            ends = (store.document_ends(begin, begin + length) - begin).tolist()
            labels[[end - 1 for end in ends]] = IGNORE
            starts = sorted({0, *ends, len(tokens)} & {*range(length)})
        return _row(ids, labels, starts)
    starts = []
    for begin, end, _ in map(store.sample, store.window(number)):
        own, learnt = slice(at, at + end - begin), store.read_mask(begin, end).astype(bool)
        ids[own] = store.read(begin, end)
        labels[own.start : own.stop - 1] = np.where(learnt[1:], ids[own][1:], IGNORE)
        starts, at = [*starts, at], own.stop
    return _row(ids, labels, [*starts, *[at] * (at < length)])


def _row(ids: NDArray[np.int64], labels: NDArray[np.int64], starts: list[int]) -> StoredRow:
    lengths = np.diff([*starts, len(ids)])
    return StoredRow(ids, labels, np.arange(len(ids)) - np.repeat(starts, lengths), starts)


def _step(
    windows: Windows | Packs,
    known: list[int],
    rows: Sequence[StoredRow],
    found: Sequence[StoredRow],
    steps: Sequence[StepBatch],
) -> Iterator[str]:
    """Yield what is wrong with the ``steps`` of ranks that have tokens of the same rows: those that are ``found`` have
    to be the ``known`` ones, in their order, and padding."""
    for step in steps:
        if step.sample_ids != known:
            yield f"rows {known[:4]} ... expected, {step.sample_ids[:4]} ... read"
            return
    for number, row, own in zip(known, rows, found, strict=False):
        at = f"row {number} of the data"
        if not np.array_equal(own.ids, row.ids):
            yield f"{at}: its tokens are not those that are stored, each once and in order"
        if not np.array_equal(own.labels, row.labels):
            yield f"{at}: a label is not the token that follows in the same document, or is missing"
        if own.starts != row.starts or not np.array_equal(own.positions, row.positions):
            yield f"{at}: its documents, or positions in them, do not begin where they are stored to begin"
    if any((own.labels != IGNORE).any() for own in found[len(known) :]):
        yield "rows behind the end of the data are learnt"
    pairs, terms = isinstance(windows, Packs) and windows.store.split.pairs, sum(row.learnt for row in rows)
    if isinstance(windows, Packs) and pairs:
        terms = sum(len(windows.pairs(number)) for number in known)
    if (counted := sum(step.terms for step in steps)) != terms:
        yield f"the loss is a mean over {terms} {'pairs' if pairs else 'tokens'}, and {counted} are counted"


def _joined(shares: Sequence[Share], steps: Sequence[StepBatch], row: int) -> StoredRow:
    """Put the tokens that ranks have of a row of their step back to their places."""
    size = shares[0].micro_batch_size
    parts, row = [step.micro_batches[row // size] for step in steps], row % size
    length = parts[0].row_length or parts[0].ids.shape[1]
    bounds = parts[0].documents if parts[0].row_length is None else parts[0].bounds
    rows = WholeRows(length, None if bounds is None else tuple(bounds.tolist()))
    joined = np.full((3, length), NOWHERE)
    for share, part in zip(shares, parts, strict=True):
        places = [at for run in share.row.runs(rows, row) for at in range(*run)]
        joined[:, places] = np.stack([each[row].numpy() for each in (part.ids, part.labels, part.positions)])
    ends = [end for end in rows.ends(row) if end < length]
    return StoredRow(joined[0], joined[1], joined[2], [0, *ends])


def _alike(one: StepBatch, other: StepBatch) -> bool:
    """Say whether two steps read the same, and end at the same place."""
    if one.sample_ids != other.sample_ids or one.cursor != other.cursor:
        return False
    pairs = zip(one.micro_batches, other.micro_batches, strict=True)
    return all(first.ids.equal(second.ids) and first.labels.equal(second.labels) for first, second in pairs)
