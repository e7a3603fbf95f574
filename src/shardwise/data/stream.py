"""The stream of a run: the samples of each optimizer step, divided among the data-parallel ranks.

The cursor is one integer: samples read so far. The step that begins at cursor c reads the samples k in [c, c + B), B
being the global batch; sample k is window ``order(k)`` (``order.py``). Data-parallel rank r takes
the r-th of ``dp`` equal parts of these B samples and divides it into micro-batches in order. So a global batch consists
of the same samples however it is divided.

Data with fewer tokens than one global batch are refused (DATA003), unless ``repeat`` allows a step to contain a sample
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from shardwise.data.micro_batch import MicroBatch, collate
from shardwise.data.order import Order
from shardwise.data.pack import Packs, Windows
from shardwise.data.portions import Portions
from shardwise.spec.layout import Layout
from shardwise.spec.plan import Batch
from shardwise.spec.rows import RowShare

Source = Windows | Packs | Portions


@dataclass(frozen=True)
class Share:
    """The part of a global batch that a rank reads: ``accumulation`` micro-batches of ``micro_batch_size`` windows on
    each of ``dp`` ranks, and of each window the tokens of ``row``; ``ahead`` as of :func:`collate`."""

    dp_rank: int
    dp: int
    micro_batch_size: int
    accumulation: int = 1
    row: RowShare = RowShare()
    ahead: bool = False

    @property
    def global_batch_size(self) -> int:
        return self.dp * self.micro_batch_size * self.accumulation


def share_of(layout: Layout, batch: Batch, rank: int, *, ahead: bool = False) -> Share:
    """Return what ``rank`` reads of every batch."""
    row = RowShare(layout.ring, layout.ulysses, layout.index(rank, "cp"))
    return Share(
        layout.index(rank, "batch"), layout.size("batch"), batch.micro_batch_size, batch.accumulation, row, ahead
    )


@dataclass(frozen=True)
class StepBatch:
    """A rank's data of one optimizer step: micro-batches, the windows in them in order, what their loss is a mean over
    (``MicroBatch.terms``, on this rank), the cursor after the step, and this rank's part of the tokens: those that are
    ``supervised``, and all that are ``read``, which padding is not."""

    micro_batches: list[MicroBatch]
    sample_ids: list[int]
    terms: int
    cursor: int
    supervised: int = 0
    read: int = 0

    @property
    def tokens(self) -> tuple[int, int]:
        """The supervised ones and those read."""
        return self.supervised, self.read


@dataclass(frozen=True)
class EvaluationBatch:
    """One batch of validation on one rank, with the bytes of text of its supervised labels (for bits per byte)."""

    micro_batch: MicroBatch
    supervised_tokens: int
    text_bytes: float


def stream(
    windows: Source,
    order: Order | Portions,
    share: Share,
    cursor: int = 0,
    waits: Sequence[Callable[[], None]] = (),
    end: int | None = None,
) -> Iterator[StepBatch]:
    """The steps from ``cursor`` on; no sample from ``end`` on is read, if it is given. A thread reads the next step
    while the caller computes; this is not part of the state: a new stream at ``StepBatch.cursor`` continues exactly
    there. A step whose portion is not prepared yet is not read ahead; when the caller asks for it, ``waits`` are called
    first."""

    def submit(cursor: int) -> Future[StepBatch] | None:
        if isinstance(windows, Portions):
            windows.advance(cursor, share.global_batch_size)
            if not windows.ready(cursor, share.global_batch_size):
                return None
        return reader.submit(read_step, windows, order, share, cursor, end)

    with ThreadPoolExecutor(1, thread_name_prefix="data") as reader:
        ahead = submit(cursor)
        while True:
            for tell in () if ahead else waits:
                tell()
            step = ahead.result() if ahead else read_step(windows, order, share, cursor, end)
            ahead, cursor = submit(step.cursor), step.cursor
            yield step


def read_step(windows: Source, order: Order | Portions, share: Share, cursor: int, end: int | None = None) -> StepBatch:
    """The part of the step at ``cursor`` that belongs to ``share``: a pure function. Rows from sample ``end`` on are
    padding without supervised tokens."""
    own = share.micro_batch_size * share.accumulation
    first = cursor + share.dp_rank * own
    last = cursor + share.global_batch_size if end is None else min(cursor + share.global_batch_size, end)
    ids = order.samples(first, max(min(own, last - first), 0)).tolist()
    samples = [windows[k] for k in ids]
    samples += [windows.padding()] * (own - len(samples)) if not isinstance(windows, Portions) else []
    rows = [samples[at : at + share.micro_batch_size] for at in range(0, own, share.micro_batch_size)]
    batches = [collate(row, ahead=share.ahead).cut(share.row) for row in rows]
    terms, supervised = sum(batch.terms() for batch in batches), sum(batch.supervised_tokens() for batch in batches)
    read = sum(len(sample.ids) - sample.padding for sample in samples) * batches[0].counts
    return StepBatch(batches, ids, terms, last, supervised, read)


def evaluation(
    windows: Windows | Packs, share: Share, numbers: Sequence[int] | None = None
) -> Iterator[EvaluationBatch]:
    """The windows of these ``numbers`` (all, if None), in order, in equally many batches on every rank: missing rows
    are padding without supervised tokens. Which windows are read does not depend on ``share``; ``share.accumulation``
    is not used."""
    numbers = range(len(windows)) if numbers is None else numbers
    for start in range(0, len(numbers), share.dp * share.micro_batch_size):
        first = start + share.dp_rank * share.micro_batch_size
        rows = numbers[first : first + share.micro_batch_size]
        padding = [windows.padding()] * (share.micro_batch_size - len(rows))
        batch = collate([*(windows[k] for k in rows), *padding]).cut(share.row)
        text_bytes = sum(windows.text_bytes(k) for k in rows if batch.counts)
        yield EvaluationBatch(batch, batch.supervised_tokens(), text_bytes)
